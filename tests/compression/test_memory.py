"""Temporary arrays are not fetched from the kernel in every step."""

import platform
import subprocess
import sys

import pytest

from tfdist.compression import memory

FAULTS = """
import ctypes, resource, sys
import numpy as np
from tfdist.compression import memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-1, 128 << 10)  # as TensorFlow's GeneratorDataset does
one = faults()
memory.keep_freed()
faults()
print(one, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_memory_is_handed_out_again():
    completed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env={})
    before, after = map(int, completed.stdout.split())
    assert after < before / 10, completed.stdout


def test_user_settings_of_the_allocator_are_kept():
    assert memory.is_left_to_us("glibc", {"HOME": "/"})
    assert not memory.is_left_to_us("musl", {})
    assert not memory.is_left_to_us("glibc", {"MALLOC_TRIM_THRESHOLD_": "1000000"})
    assert not memory.is_left_to_us("glibc", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"})
