"""Groups of processes that train at the same time, in one job."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess


def test_two_pairs_train_different_models():
    ends = harness.run([str(harness.PROGRAMS / "pairs.py")], 4)
    writers = [end.output.rpartition("DONE ")[2].split()[0] for end in ends]
    assert writers == ["True", "False", "False", "True"], writers  # the first of each pair
    harness.assert_nothing_left()
