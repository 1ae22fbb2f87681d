"""What a strategy with a mesh splits; `tests/multiprocess/test_split_layers.py` trains it."""

import functools
import math

import keras
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards
from tfdist.layers import ColumnParallelDense
from tfdist.runtime.mesh import Mesh
from tfdist.strategies.all_reduce.mesh_extended import MeshExtended
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.divided.footprint import footprint_of


def strategy_of(group, shard=None, **axes):
    return RankedShards(group, functools.partial(MeshExtended, Mesh(**axes), shard))


def test_split_weights_and_what_the_optimizer_keeps_for_them_are_parts(ranks, caplog):
    """Others are whole on each process; those with the same place along the axis have copies of a part."""

    def work(group):
        strategy = strategy_of(group, data=2, model=2)
        with strategy.scope():
            split, whole = ColumnParallelDense(4, use_bias=False), keras.layers.Dense(5)
            split.build((None, 3))
            whole.build((None, 3))
            optimizer = keras.optimizers.Adam()
            optimizer.build([split.kernel, *whole.weights])
        dealing = strategy.extended.ready(optimizer)
        assert weight_parts.of(whole.kernel) is None
        assert split.count_params() == 12
        momentum = optimizer._momentums
        assert momentum[1].numpy().shape == (3, 5)
        return weight_parts.of(split.kernel).copy.numpy().tolist(), dealing.part(momentum[0]).shape

    caplog.set_level("INFO", "tfdist")
    parts = [part for part, shape in ranks(4)(work) if shape == (3, 2)]
    assert parts[0] == parts[2] != parts[1] == parts[3]
    assert "Mesh(data=2, model=2): 1 weight(s) are split. With the optimizer's variables" in caplog.text


def test_models_without_split_layers_are_not_divided(ranks):
    def work(group):
        with strategy_of(group, model=2).scope():
            layer, optimizer = keras.layers.Dense(1 << 17), keras.optimizers.Adam()
            layer.build((None, 3))
            optimizer.build(layer.trainable_variables)
        return weight_parts.of(layer.kernel) is None and optimizer._momentums[0].shape == (3, 1 << 17)

    assert all(ranks(2)(work))


def test_others_are_divided_if_that_is_wanted(ranks):
    def work(group):
        with strategy_of(group, "weights", model=2).scope():
            split, large = ColumnParallelDense(4), keras.layers.Dense(1 << 16, use_bias=False)
            split.build((None, 3))
            large.build((2, 2))
        return [tuple(weight_parts.of(layer.kernel).copy.shape) for layer in (split, large)]

    assert ranks(2)(work) == [[(3, 2), (1, 1 << 16)]] * 2


@pytest.mark.parametrize(("axes", "sent"), [({"model": 2}, 0), ({"data": 2, "model": 2}, 24)])
def test_weights_of_split_layers_are_not_gathered(ranks, axes, sent):
    """Their gradients are summed over copies alone."""

    def work(group):
        strategy = strategy_of(group, "weights", **axes)
        with strategy.scope():
            layer, optimizer = ColumnParallelDense(4, use_bias=False), keras.optimizers.SGD(momentum=0.9)
            layer.build((None, 3))
            optimizer.build(layer.trainable_variables)
        return footprint_of(strategy.extended.ready(optimizer))

    footprint = ranks(math.prod(axes.values()))(work)[0]
    assert (footprint.weights, footprint.sent, footprint.in_parts) == (24, sent, 0)
    assert " bytes in a step, and what split layers exchange." in str(footprint)


def test_a_mesh_of_another_size_is_refused(ranks):
    def work(group):
        with pytest.raises(ValueError, match=r"Mesh\(data=2, model=2\) is for 4 processes .*, and 2 train together"):
            strategy_of(group, data=2, model=2)

    ranks(2)(work)


def test_optimizers_that_look_at_whole_weights_are_refused(ranks):
    def work(group):
        with strategy_of(group, model=2).scope():
            layer, optimizer = ColumnParallelDense(4), keras.optimizers.Lamb()
            layer.build((None, 3))
            with pytest.raises(ValueError, match=r"a part of the weight .*kernel, and the optimizer lamb may look at"):
                optimizer.build(layer.trainable_variables)

    ranks(2)(work)


def test_whole_gradients_of_split_weights_are_summed(ranks):
    """A loop of one's own may have computed them in another way."""

    def work(group):
        strategy = strategy_of(group, data=2, model=2)
        with strategy.scope():
            layer, optimizer = ColumnParallelDense(4, kernel_initializer="zeros"), keras.optimizers.SGD(1.0)
            layer.build((None, 3))
            optimizer.build(layer.trainable_variables)
        columns = tf.range(4.0) * (group.rank + 1)
        gradients = [tf.repeat(columns[None], 3, 0), columns]
        strategy.run(lambda: optimizer.apply(gradients, layer.trainable_variables))
        return [weight.tolist() for weight in layer.get_weights()]

    row = [0, -10, -20, -30]
    assert ranks(4)(work) == [[[row] * 3, row]] * 4
