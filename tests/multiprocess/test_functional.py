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
    "fit_without_a_strategy",
    "joining",
    "whatever_ranks_count",
]
IN_SWEEPS = [sweep(check) for check in CHECKS]


@checks({2: IN_SWEEPS, 3: CHECKS, 4: IN_SWEEPS})
def test_functional_interface(size, check, passes):
    passes(size, check)


@pytest.mark.parametrize("what", ["op", "root"])
def test_different_arguments_on_ranks_raise(what):
    with harness.started([PROGRAM], 2, {"TEST_DIFFERENT": what}) as processes:
        assert all(end.code == 1 for end in processes.wait()), processes.outputs()
        outputs = processes.outputs()
    assert outputs.count("MismatchError: ranks take part in different collectives") == 2, outputs
    harness.assert_nothing_left()
