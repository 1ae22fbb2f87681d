"""The few small things that ranks of MPI tell each other before they have a rendezvous, as JSON.

mpi4py's methods for objects unpickle what arrives, and a pickle runs code; so they are not used anywhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

_BYTES = 4096


def agree(comm: Any, text: str) -> bool:
    """Whether every rank has the same text."""
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    everyone = np.empty((comm.Get_size(), own.size), np.uint8)
    comm.Allgather(own, everyone)
    return bool((everyone == own).all())


def broadcast(comm: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's message, on every rank.

    Args:
        comm: an mpi4py communicator.
        message: for JSON, of less than 4 KiB; of rank 0.
    """
    buffer = np.zeros(_BYTES, np.uint8)
    if comm.Get_rank() == 0:
        line = json.dumps(message).encode()
        buffer[: len(line)] = np.frombuffer(line, np.uint8)
    comm.Bcast(buffer)
    return json.loads(buffer.tobytes().rstrip(b"\0"))
