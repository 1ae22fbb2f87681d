import math

import pytest

from tfdist.parameter_server.options.staleness import (
    DelayCompensated,
    DropBeyond,
    Exponential,
    Inverse,
    Unscaled,
)


@pytest.mark.parametrize(
    ("policy", "scales"),
    [
        (Unscaled(), [1, 1, 1, 1]),
        (Inverse(), [1, 1, 1 / 2, 1 / 10]),
        (Exponential(0.5), [1, math.exp(-0.5), math.exp(-1), math.exp(-5)]),
        (DropBeyond(2), [1, 1, 1, None]),
        (DropBeyond(0), [1, None, None, None]),
        (DelayCompensated(), [1, 1, 1, 1]),
    ],
)
def test_policies_scale_gradients_by_staleness(policy, scales):
    assert [policy.scale(staleness) for staleness in (0, 1, 2, 10)] == scales


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exponential(0),
        lambda: Exponential(-1),
        lambda: DropBeyond(-1),
        lambda: DelayCompensated(0),
        lambda: DelayCompensated(decay=1),
    ],
)
def test_invalid_numbers_raise(make):
    with pytest.raises(ValueError, match="must be"):
        make()
