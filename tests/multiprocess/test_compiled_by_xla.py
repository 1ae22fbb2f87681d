"""Steps that XLA compiles train as those that it does not, on several processes."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "compiled_by_xla.py")
SWEPT = [*map(sweep, ("models", "more_models", "waiting"))]


@checks({1: SWEPT[:2], 2: ["models", *SWEPT[1:]], 3: SWEPT})
def test_steps_train_equally_with_xla(size, check, passes):
    passes(size, check)
