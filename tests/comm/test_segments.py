"""The names of MPI's segments."""

import os

import pytest

from tfdist.comm import segments

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux")


def test_names_of_a_job_are_those_that_mpich_gives():
    """FNV-1a's known values; MPICH hashes the name of its key-value space with it."""
    assert segments._world_id("") == 0x811C9DC5
    assert segments._world_id("a") == 0xE40C292C
    assert segments._world_id("foobar") == 0xBF9CF968


def test_only_the_names_of_the_job_are_removed():
    number = segments._world_id("job of a test")
    ours = [f"/dev/shm/mpich_shm_{number:x}_0", f"/dev/shm/mpich_vci_{number:x}_1", "/dev/shm/job of a test_0"]
    other = f"/dev/shm/mpich_shm_{number:x}0_0"
    try:
        for path in (*ours, other):
            open(path, "x").close()
        segments.unlink_of("job of a test")
        assert [path for path in (*ours, other) if os.path.exists(path)] == [other]
    finally:
        for path in (*ours, other):
            if os.path.exists(path):
                os.unlink(path)
