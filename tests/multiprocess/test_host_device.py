"""Where host calls and shares of batches are, if replicas are on other devices, as GPUs are."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "host_device.py")
CHECKS = ["all_reduce", "scaled_losses", "two_replicas_in_each_process", "gossip", "loop", "optimizer", "overlapping"]
SWEPT = ["compressed", "delayed", "local_sgd", "relocated", "sharded", "stages"]


@checks({2: [*CHECKS, *map(sweep, SWEPT)]})
def test_host_operations_run_on_the_host_device(size, check, passes):
    passes(size, check)
