import numpy as np
import pytest

from tfdist.local_sgd.intervals import Every, Growing, QuadraticRule


def test_every_gives_constant_intervals():
    assert [Every(3).steps(step, 0.1) for step in (0, 1, 100)] == [3, 3, 3]
    assert Every(3).least == 3
    assert repr(Every(3)) == "Every(3)"


def test_growing_intervals_multiply_up_to_limit():
    interval = Growing(first=2, every=10, factor=2.0, at_most=12)
    assert [interval.steps(step, 0.1) for step in (0, 9, 10, 20, 29, 30, 10**9)] == [2, 2, 4, 8, 8, 12, 12]
    assert interval.least == 2


def test_the_quadratic_rule_follows_the_learning_rate():
    interval = QuadraticRule(alpha=0.2, at_least=4, at_most=500)
    assert [interval.steps(0, rate) for rate in (0.2, 0.1, 0.05, 0.02, 0.001, 0.0)] == [4, 4, 16, 100, 500, 500]
    assert QuadraticRule(alpha=0.1, at_least=1).steps(0, float(np.float32(0.05))) == 4
    assert interval.least == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0), "got sync_every=0"),
        (lambda: Every(True), "got sync_every=True"),
        (lambda: Every("8"), "got sync_every='8'"),
        (lambda: Growing(0, 10), "got first=0"),
        (lambda: Growing(2, 10, factor=0.5), "factor above 1"),
        (lambda: Growing(2, 10, factor=float("nan")), "factor above 1"),
        (lambda: QuadraticRule(float("nan")), "alpha above 0"),
        (lambda: Growing(20, 10, at_most=10), "at_most of at least first"),
        (lambda: QuadraticRule(-1.0), "alpha above 0"),
        (lambda: QuadraticRule(1.0, at_least=9, at_most=8), "at_most of at least at_least"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
