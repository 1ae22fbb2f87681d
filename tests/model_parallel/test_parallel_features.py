"""What may take features that a split layer leaves on several processes."""

import keras
import numpy as np
import pytest

from tests.model_parallel.test_split_layers import meshed
from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense

X = np.zeros((3, 4), np.float32)


def layers_between(group, *layers):
    """A model with layers between two split ones, which leave their features on several processes."""
    with meshed(group).scope():
        parts = ColumnParallelDense(8, gather_output=False), *layers, RowParallelDense(2, input_is_parallel=True)
        return keras.Sequential([keras.Input((4,)), *parts])


def test_layers_that_act_on_each_feature_apart_stand_in_between(ranks):
    between = keras.layers.Activation("tanh"), keras.layers.Dropout(0.1)
    assert ranks(2)(lambda group: layers_between(group, *between)(X).shape) == [(3, 2)] * 2


@pytest.mark.parametrize(
    "make",
    [
        keras.layers.LayerNormalization,
        keras.layers.BatchNormalization,
        keras.layers.PReLU,
        keras.layers.Softmax,
        keras.layers.Flatten,
        lambda: keras.layers.Dense(8),
        lambda: keras.layers.Activation("softmax"),
        lambda: keras.layers.Activation("relu", activity_regularizer="l2"),
    ],
)
def test_layers_that_look_at_several_features_are_refused(ranks, make):
    def work(group):
        with pytest.raises(ValueError, match="looks at several of them, or has weights or a loss: use gather_output"):
            layers_between(group, make())

    ranks(2)(work)


@pytest.mark.parametrize("make", [ColumnParallelDense, RowParallelDense, lambda size: ParallelEmbedding(4, size)])
def test_split_layers_that_take_whole_rows_are_refused(ranks, make):
    def work(group):
        with pytest.raises(ValueError, match=r"takes whole rows: use gather_output=True there"):
            layers_between(group, make(8))

    ranks(2)(work)


def test_models_do_not_return_features_in_parts(ranks):
    """Their shapes may be computed: a larger model may take them."""

    def work(group):
        with meshed(group).scope():
            inner = keras.Sequential([keras.Input((4,)), ColumnParallelDense(8, gather_output=False)])
            whole = keras.Sequential([inner, RowParallelDense(2, input_is_parallel=True)])
        assert whole(X).shape == (3, 2)
        with pytest.raises(ValueError, match=r"the model sequential.* returns what ColumnParallelDense .* leaves on"):
            inner(X)

    ranks(2)(work)


def test_without_a_split_any_layer_may_follow(ranks):
    assert ranks(1)(lambda group: layers_between(group, keras.layers.LayerNormalization())(X).shape) == [(3, 2)]
