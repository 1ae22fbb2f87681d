"""Joins a job and sums arrays of several sizes with several algorithms; checks every element. Without TensorFlow.

TEST_FORBIDDEN names system calls that are refused to this process, as a container's seccomp profile does it.
"""

import ctypes
import errno
import logging
import os
import platform
import struct

import numpy as np

from tfdist.cluster import discovery
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.runtime import world

CALLS = {
    "x86_64": {"process_vm_readv": 310, "memfd_create": 319},
    "aarch64": {"process_vm_readv": 270, "memfd_create": 279},
}


def forbid(names):
    """A seccomp filter: load the number of the system call, compare it with each, return an error or allow it."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    program = [(0x20, 0, 0, 0)]
    for place, number in enumerate(numbers):
        program.append((0x15, len(numbers) - place, 0, number))
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


if forbidden := os.environ.get("TEST_FORBIDDEN"):
    forbid(forbidden.split())
logging.basicConfig(format="%(message)s", level=logging.INFO)
entered = world.enter(discovery.discover(None), Timeouts.from_environment())
print("ENTERED", flush=True)
expected = sum(range(1, entered.size + 1))
for algorithm in ("ring", "mpi"):
    for count in (1, 1000, 10_000, 1_000_000):
        value = np.arange(count) % 7 * (entered.rank + 1.0)
        entered.engine.run(f"{algorithm} {count}", ALGORITHMS[algorithm](value))
        assert np.array_equal(value, np.arange(count) % 7 * float(expected)), (algorithm, count)
hosts, nodes = entered.engine.communicator.hosts, entered.engine.communicator.nodes
print("RIGHT", f"hosts {len(set(hosts))}", f"nodes {len(set(nodes))}", flush=True)
