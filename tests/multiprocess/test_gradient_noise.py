"""The noise of gradients, with two devices in each process and with one."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

CHECKS = ["each_step", "without_a_strategy", "closed_form", "sparse_and_mixed", "afterwards", "refused"]


def test_noise_is_what_it_is_defined_as():
    for end in harness.run([str(harness.PROGRAMS / "gradient_noise.py")], 2, deadline=200):
        passed = [line.split()[1] for line in end.output.splitlines() if line.startswith("PASSED ")]
        assert passed == CHECKS, end.output
    harness.assert_nothing_left()
