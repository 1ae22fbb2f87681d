"""Callbacks and saving on two processes, each with a folder of its own."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "callbacks_and_saving.py")
CHECKS = [
    "weights_are_identical_to_the_last_bit",
    "model_checkpoint_is_written_by_the_chief",
    "checkpoint_in_the_middle_of_an_epoch",
    sweep("backup_and_restore"),  # as custom steps (test_backup.py), optimizers in parts and groups
    "writing_callbacks",
    "early_stopping_and_plateau",
    "one_rank_wishes_to_stop_in_the_middle_of_an_epoch",
    "save_and_load",
    "the_chief_alone_saves",
    "weights_that_only_the_chief_has",
    "what_is_saved_in_several_files_or_not_over_others",
    "nan_stops_all",
    "all_of_it_inside_of_the_scope",
    "a_damaged_backup",
    "weights_that_are_not_equal",
    "weights_that_one_rank_restores_at_the_end",
    "arguments_that_differ",
    "optimizers_that_are_not_equal",
    "progress_is_shown_by_the_chief",
    "an_optimizer_made_outside_of_the_scope",
]


@checks({2: CHECKS})
def test_callbacks_and_saving_on_two_processes(size, check, passes):
    passes(size, check)
