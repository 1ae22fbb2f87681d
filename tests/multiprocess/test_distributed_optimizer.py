"""Optimizers and tapes that average gradients, and the callbacks that go with them, against plain Keras."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "distributed_optimizer.py")
CHECKS = [
    "equal",
    "ways",
    "loops",
    "local",
    "mixed",
    "compressed",
    "adaptive",
    "noisy",
    "saved",
    "uneven",
    "callbacks",
    "committed",
    "refused",
]


@pytest.mark.parametrize("size", [2, 3])
def test_shares_train_as_the_whole_batch(size, tmp_path):
    for end in harness.run([PROGRAM, str(tmp_path)], size, deadline=300):
        passed = [line.split()[1] for line in end.output.splitlines() if line.startswith("PASSED ")]
        assert sorted(passed) == sorted(CHECKS + ["groups"] * (size > 2)), end.output
