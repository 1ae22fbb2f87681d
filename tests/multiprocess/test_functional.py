"""`tfdist.init`, `tfdist.all_reduce` and their like, on real processes."""

import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("size", [sweep(2), 3, sweep(4)])
def test_functional_interface(size):
    for end in harness.run([str(harness.PROGRAMS / "functional.py")], size):
        assert "DONE" in end.output
    harness.assert_nothing_left()


@pytest.mark.parametrize("what", ["op", "root"])
def test_ranks_that_mean_different_things(what):
    with harness.started([str(harness.PROGRAMS / "functional.py")], 2, {"TEST_DIFFERENT": what}) as processes:
        assert all(end.code == 1 for end in processes.wait()), processes.outputs()
        outputs = processes.outputs()
    assert outputs.count("MismatchError: ranks take part in different collectives") == 2, outputs
    harness.assert_nothing_left()
