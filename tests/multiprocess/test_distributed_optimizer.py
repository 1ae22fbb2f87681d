"""Optimizers and tapes that average gradients, and the callbacks that go with them, against plain Keras."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "distributed_optimizer" / "main.py")
CHECKS = [
    "equal",
    "ways",
    "ranks",
    "loops",
    "local",
    "mixed",
    "compressed",
    "adaptive",
    "noisy",
    "saved",
    "uneven",
    "callbacks",
    "resumed",
    "set_by_callbacks",
    "committed",
    "refused",
]
IN_SWEEPS = ["mixed", "noisy"]
ON_THREE = ["uneven", "groups"]


@checks(
    {
        2: [sweep(name) if name in IN_SWEEPS else name for name in CHECKS],
        3: [*ON_THREE, *(sweep(name) for name in CHECKS if name not in ON_THREE)],
    }
)
def test_shares_train_as_the_whole_batch(size, check, passes):
    passes(size, check)
