"""`keras.distribution` on the processes of a job: the updates of plain Keras, and what is refused."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "keras_distribution.py")
CHECKS = ["guide", "turns", "single_batches", "own_data", "refused"]


@checks({2: CHECKS, 3: [*map(sweep, CHECKS)]})
def test_scripts_for_keras_distribution_train_as_plain_keras(size, check, passes):
    passes(size, check)
