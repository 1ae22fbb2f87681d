"""Which weights are kept in rows; `tests/multiprocess/test_weight_parts.py` trains them."""

import keras
import pytest

from tests.strategies.ranked import RankedShards
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.divided.footprint import footprint_of

LARGE = 1 << 16
"""Rows of one float32 that are not more than what stays whole."""


def kernels(strategy, *sizes, **how):
    with strategy.scope():
        layers = [keras.layers.Dense(1, use_bias=False, **how) for _ in sizes]
        for layer, size in zip(layers, sizes, strict=True):
            layer.build((1, size))
    return [layer.kernel for layer in layers]


def test_large_weights_are_cut(ranks):
    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        found = [weight_parts.of(kernel) for kernel in kernels(strategy, LARGE, LARGE + 1)]
        constrained = kernels(strategy, LARGE + 1, kernel_constraint=keras.constraints.NonNeg())[0]
        with strategy.scope():
            state = keras.Variable(lambda shape, dtype: keras.ops.zeros(shape, dtype), shape=(LARGE + 1,))
        assert weight_parts.of(constrained) is weight_parts.of(state) is None
        return [None if kept is None else kept.copy.shape[0] for kept in found]

    assert ranks(2)(work) == [[None, LARGE // 2], [None, LARGE // 2 + 1]]
    assert ranks(1)(work) == [[None, None]]


def test_ranks_have_rows_of_what_the_optimizer_keeps(ranks):
    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        (kernel,) = kernels(strategy, LARGE + 1)
        with strategy.scope():
            optimizer = keras.optimizers.Adam()
            optimizer.build([kernel])
        return footprint_of(strategy.extended.ready(optimizer))

    footprint = ranks(2)(work)[0]
    own, all_rows = 4 * (LARGE // 2 + 1), 4 * (LARGE + 1)
    assert footprint.weights == own
    assert footprint.in_parts == all_rows
    assert footprint.slots == (2 * 4 * (LARGE // 2), 2 * own)
    assert footprint.sent == 3 * own
    assert "weights and gradients of at most 0.1 MB each" in str(footprint)


def test_optimizers_that_look_at_whole_weights_are_refused(ranks):
    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        trained = kernels(strategy, LARGE + 1)
        with strategy.scope():
            optimizer = keras.optimizers.Lamb()
            with pytest.raises(ValueError, match=r"keeps a part of the weight .*kernel"):
                optimizer.build(trained)

    ranks(2)(work)
