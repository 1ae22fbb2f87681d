"""`PipelineStrategy(mesh=…)`: plain Keras's updates and files, with layers that are split within stages."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "split_stages.py")
CHECKS = [
    *("models", "schedules", "optimizers", "accumulation", "few", "ways"),
    *("dealt", "assigned", "files", "moved", "restarted", "refused"),
]
ALWAYS = {2: ["files"], 4: ["copies", "dealt", "refused"], 8: []}


@checks(
    {size: [*always, *(sweep(check) for check in CHECKS if check not in always)] for size, always in ALWAYS.items()}
)
def test_split_layers_in_stages_train_as_plain_keras(size, check, passes):
    passes(size, check)


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_rank_is_named(tmp_path, rank):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], 4, rank, TEST_CASES="endless")


def test_a_call_on_one_rank_alone_is_named(tmp_path):
    harness.assert_all_fail([PROGRAM, str(tmp_path)], "rank 0 waits in eager gather", TEST_CASES="alone")
