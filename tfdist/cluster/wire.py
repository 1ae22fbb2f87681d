"""What tasks and the rendezvous server say to each other: JSON objects, one a line, and the proof of a secret.

The handshake is a mutual challenge and response. Each side sends a random nonce; each proves that it knows
the job's secret with an HMAC-SHA256 over its role, both nonces and what it says about itself, so that neither
the secret crosses the wire nor an old answer can be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

PROTOCOL = 4
"""Raised whenever the messages change, so that unlike versions part with a clear message."""

MAX_LINE = 1 << 24
"""Bytes in a message at most. Longer ones end the connection."""

MAX_HANDSHAKE_LINE = 1 << 13
"""Bytes in a message at most from someone who has not proven anything yet."""

HEARTBEAT_SECONDS = 1.0
"""How often each side gives a sign of life."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line.

    Raises:
        ValueError: the line is no JSON object.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def nonce() -> str:
    """A random challenge, as hexadecimal digits."""
    return secrets.token_hex(16)


def prove(secret: bytes, role: str, nonces: tuple[str, str], claims: dict[str, Any]) -> str:
    """The proof that ``role`` knows the secret and stands by its claims.

    Args:
        secret: the job's secret; empty when it has none (the proof is then worthless, but well defined).
        role: ``"task"`` or ``"server"``, so that one side's proof is no answer of the other's.
        nonces: the server's and the task's.
        claims: what the side says of itself, JSON-serializable.

    Returns:
        Hexadecimal digits.
    """
    text = json.dumps([role, *nonces, claims], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def proven(proof: Any, expected: str) -> bool:
    """Compares two proofs in constant time."""
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
