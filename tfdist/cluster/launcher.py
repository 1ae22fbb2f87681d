"""What mpiexec and srun put into a process's environment."""

from __future__ import annotations

import os

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def size() -> int:
    """How many processes the MPI launcher started; 1 when there is none."""
    for name in _SIZES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1
