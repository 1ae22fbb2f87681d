"""Where models are cut."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.model_parallel.partition import partition
from tfdist.model_parallel.split_layers import ColumnParallelDense, RowParallelDense
from tfdist.pipeline.cuts import check, ends_of
from tfdist.strategies.divided import described_variables

NAMES = ["a", "b", "c", "inner/d", "e"]


def calls_of():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(64, name="d")], name="inner")
    first = [layers.Dense(8, name=name) for name in "abc"]
    return ModelCalls(keras.Sequential([keras.Input((8,)), *first, inner, layers.Dense(8, name="e")]))


def test_stages_begin_at_named_calls():
    calls = calls_of()
    assert [call.name for call in calls.calls] == NAMES
    assert ends_of(calls, 3, ["b", "inner/d"]) == [1, 3, 5]
    with pytest.raises(ValueError, match=r"no call 'inner/f'; use a name such as inner/d"):
        ends_of(calls, 2, ["inner/f"])
    for names in (["c", "b"], ["a"], ["b", "b"]):
        with pytest.raises(ValueError, match=r"must come after the one before it, .*a, b, c, inner/d, e"):
            ends_of(calls, len(names) + 1, names)


def test_cuts_by_cost_allocate_no_variables():
    described_variables.install()
    with described_variables.describing():
        calls = calls_of()
    assert ends_of(calls, 2, "flops") == [4, 5]
    assert ends_of(calls, 5, "memory") == [1, 2, 3, 4, 5]
    layer = calls.calls[0].operation
    assert described_variables.is_described(layer.kernel)
    with pytest.raises(ValueError, match=r"6 stages need at least as many calls .* makes 5"):
        ends_of(calls, 6, "flops")


@pytest.mark.parametrize("seed", range(4))
def test_largest_stage_is_close_to_optimum(seed):
    widths = np.random.default_rng(seed).integers(8, 96, 8)
    with described_variables.describing():
        hidden = [layers.Dense(width, "relu") for width in widths.tolist()]
        calls = ModelCalls(keras.Sequential([keras.Input((16,)), *hidden]))
    parameters = [call.operation.count_params() for call in calls.calls]

    def largest(ends):
        return max(sum(parameters[begin:end]) for begin, end in itertools.pairwise((0, *ends)))

    best = min(largest((*cut, len(parameters))) for cut in itertools.combinations(range(1, len(parameters)), 2))
    assert largest(ends_of(calls, 3, "memory")) <= 1.15 * best


def test_cuts_can_be_given_as_partition():
    calls = calls_of()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="other")])
    plan = partition(next(iter(calls.graphs.values()))[0], stages=2, balance="flops", verbose=False)
    assert ends_of(calls, 2, plan) == [4, 5]
    with pytest.raises(ValueError, match="a model with other calls: it begins with 'other'"):
        ends_of(calls, 1, partition(model, stages=1, balance="flops", verbose=False))


def test_invalid_cuts_raise():
    check("memory", 2)
    check(["b"], 2)
    with pytest.raises(ValueError, match=r'must be "flops" or "memory", the cost to balance.*got \'time\''):
        check("time", 2)
    with pytest.raises(ValueError, match=r"stages=3\): the cuts, .*, make 2 stages"):
        check(["b"], 3)
    with pytest.raises(TypeError, match="a list of the names of the layers"):
        check([1, 2], 3)


@pytest.mark.parametrize("cuts", ["flops", "memory"])
def test_models_with_unknown_input_length_can_be_cut(cuts):
    inputs = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(9, 16)(inputs)
    outputs = layers.Dense(2)(layers.LSTM(16)(layers.LSTM(16, return_sequences=True)(embedded)))
    assert ends_of(ModelCalls(keras.Model(inputs, outputs)), 2, cuts) == [2, 4]


def test_cut_by_cost_raises_if_shapes_are_unknown():
    inputs = keras.Input((None,))
    outputs = layers.Dense(2, name="last")(layers.Reshape((4,), name="rows")(inputs))
    with pytest.raises(ValueError, match=r'cuts="flops"\).*are unknown, even with 128 .*cuts=\[….*out of rows, last'):
        ends_of(ModelCalls(keras.Model(inputs, outputs)), 2, "flops")


def test_models_are_not_cut_where_features_are_on_several_processes():
    def calls(parts):
        leaves = ColumnParallelDense(512, name="columns", gather_output=False)
        leaves._parts = parts  # as a mesh would have it
        takes = RowParallelDense(8, name="rows", input_is_parallel=True)
        between = layers.Activation("relu", name="between")
        first, last = layers.Dense(8), layers.Dense(8)
        return ModelCalls(keras.Sequential([keras.Input((8,)), first, leaves, between, takes, last]))

    assert ends_of(calls(1), 2, ["between"]) == [2, 5]
    assert ends_of(calls(2), 3, "flops") == [1, 4, 5]
    for name in ("between", "rows"):
        with pytest.raises(ValueError, match=rf"cuts=\['{name}'\]\): the features that (columns|between) leaves"):
            ends_of(calls(2), 2, [name])
    with pytest.raises(ValueError, match="this model makes 5, which can be cut in 2 places"):
        ends_of(calls(2), 4, "memory")
