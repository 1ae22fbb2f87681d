"""`AllReduceStrategy(shard="weights")`: plain Keras's updates, files and callbacks, with weights in rows."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "weight_parts.py")
CHECKS = ["models", "optimizers", "loops", "files", "restarted", "read", "refused"]
MORE = ["convolutions", "accumulation", "ways", "optimizers_exchanged"]
AT_ONCE = ["models_at_once", "convolutions_at_once", "ways_at_once", "loops_at_once"]


@checks({2: [*CHECKS, *map(sweep, (*MORE, *AT_ONCE))], 3: [*map(sweep, CHECKS)]})
def test_weights_in_rows_train_as_plain_keras(size, check, passes):
    passes(size, check)


def test_killed_rank_is_named(tmp_path):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], TEST_CASES="endless")


def test_reading_on_one_rank_alone_is_named(tmp_path):
    message = r"rank 0 waits in eager weights by owner #0 of float64 \(7, 6\)"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="alone")
