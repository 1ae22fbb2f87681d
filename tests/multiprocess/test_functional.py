"""`tfdist.init`, `tfdist.all_reduce` and their like, on real processes."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "functional.py")
CHECKS = [
    "values",
    "gradients",
    "gradients_of_gradients",
    "small_integers",
    "means_near_the_limits",
    "slices",
    "weights",
    "groups",
    "edges",
    "variables",
    "wrong",
    "mismatches",
    "mismatches_in_graphs",
    "fit_without_a_strategy",
    "a_model_that_communicates_on_some_ranks",
    "joining",
    "whatever_ranks_count",
]
IN_SWEEPS = [sweep(check) for check in CHECKS]


@checks({2: IN_SWEEPS, 3: CHECKS, 4: IN_SWEEPS})
def test_functional_interface(size, check, passes):
    passes(size, check)


@pytest.mark.parametrize("what", ["op", "root", "branch"])
def test_different_arguments_on_ranks_raise(what):
    with harness.started([PROGRAM], 2, {"TEST_DIFFERENT": what}) as processes:
        for end in processes.wait():
            assert end.code == 1, processes.outputs()
            assert "MismatchError: ranks take part in different collectives" in end.output, processes.outputs()
    harness.assert_nothing_left()
