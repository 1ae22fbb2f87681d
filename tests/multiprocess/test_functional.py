"""`tfdist.init`, `tfdist.all_reduce` and their like, on real processes."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("size", [2, 3, 4])
def test_functional_interface(size):
    for end in harness.run([str(harness.PROGRAMS / "functional.py")], size):
        assert "DONE" in end.output
    harness.assert_nothing_left()
