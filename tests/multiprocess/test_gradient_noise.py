"""The noise of gradients, with two devices in each process and with one."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "gradient_noise.py")
CHECKS = ["each_step", "without_a_strategy", "closed_form", sweep("sparse_and_mixed"), sweep("afterwards"), "refused"]


@checks({2: CHECKS})
def test_measured_noise_equals_its_definition(size, check, passes):
    passes(size, check)
