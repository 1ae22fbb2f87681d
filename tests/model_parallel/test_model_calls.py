"""Calls of models inside models stand in one sequence, which computes what the model does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.model_parallel.test_device_scope import Subclassed, cnn, transformer, two_sequences
from tfdist.model_parallel.device_scope import device_scope
from tfdist.model_parallel.model_calls import ModelCalls


def dense(units, name, **kwargs):
    return keras.layers.Dense(units, name=name, **kwargs)


def base():
    """A model in two levels, the inner one Sequential."""
    inner = keras.Sequential(
        [keras.Input((4,)), dense(4, "one"), keras.layers.BatchNormalization(name="two")], name="inner"
    )
    inputs = keras.Input((4,))
    return keras.Model(inputs, [dense(3, "left")(inner(inputs)), dense(3, "right")(inputs)], name="base")


def fine_tuned():
    inputs = keras.Input((4,))
    left, right = base()(inputs, training=False)
    return keras.Model(inputs, dense(1, "head")(keras.layers.Add(name="sum")([left, right])))


def masked_inside():
    inner = keras.Sequential([keras.Input((None,)), keras.layers.Embedding(5, 4, mask_zero=True)], name="words")
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, keras.layers.LSTM(3)(inner(inputs)))


def named_inputs():
    inner_inputs = {"b": keras.Input((4,), name="b"), "a": keras.Input((4,), name="a")}
    inner = keras.Model(inner_inputs, keras.layers.Subtract()([inner_inputs["b"], inner_inputs["a"]]))
    inputs = [keras.Input((4,)), keras.Input((4,))]
    return keras.Model(inputs, dense(1, "head")(inner({"a": inputs[0], "b": inputs[1]})))


MODELS = {
    "fine_tuned": fine_tuned,
    "masked_inside": masked_inside,
    "named_inputs": named_inputs,
    "cnn": lambda: cnn("CPU:0", "CPU:0"),
    "transformer": lambda: transformer("CPU:0", "CPU:0"),
    "shared": lambda: two_sequences(keras.layers.LSTM(4), "CPU:0", "CPU:0"),
}


@pytest.mark.parametrize("name", MODELS)
def test_calls_run_in_sequence_equal_the_model(name):
    model = MODELS[name]()
    calls = ModelCalls(model)
    shapes = [[5, *tensor.shape[1:]] for tensor in model.inputs]
    given = [
        tf.constant(np.random.default_rng(0).integers(0, 4, shape), model_input.dtype)
        for model_input, shape in zip(model.inputs, shapes, strict=True)
    ]
    values = dict(zip(calls.inputs, given, strict=True))
    for place in range(len(calls.calls)):
        part = calls.calls[place : place + 1]
        assert set(calls.sources(part)) <= values.keys()
        calls.run(part, values, training=False)
        assert set(calls.needed_of(place, place + 1)) <= values.keys()
    (result,) = (values[key] for key in calls.outputs)
    np.testing.assert_array_equal(result, model(given if len(given) > 1 else given[0], training=False))


def test_models_with_several_inputs_are_opened():
    names = [call.name for call in ModelCalls(named_inputs()).calls]
    assert len(names) == 2
    assert "/subtract" in names[0]


def test_nested_calls_have_path_names_and_training_flags():
    calls = ModelCalls(fine_tuned()).calls
    assert sorted(call.name for call in calls) == [
        "base/inner/one",
        "base/inner/two",
        "base/left",
        "base/right",
        "head",
        "sum",
    ]
    assert {call.name: call.training for call in calls}["base/inner/two"] is False
    assert {call.name: call.training for call in calls}["head"] is None


def test_unplaced_nested_calls_inherit_device_of_outer_model():
    inputs = keras.Input((4,))
    with device_scope("CPU:1"):
        inner = keras.Sequential([keras.Input((4,)), dense(4, "placed")], name="inner")
    with device_scope("CPU:2"):
        outputs = keras.Sequential([keras.Input((4,)), dense(4, "not_placed")], name="outer")(inner(inputs))
    devices = {call.name: call.device for call in ModelCalls(keras.Model(inputs, outputs)).calls}
    assert devices["inner/placed"] == "/device:CPU:1"
    assert devices["outer/not_placed"] == "/device:CPU:2"


class OwnCall(keras.Model):
    def call(self, inputs):
        return 2 * super().call(inputs)


def called_twice(inputs):
    inner = keras.Sequential([keras.Input((4,)), dense(4, "one")])
    return inner(inner(inputs))


def with_a_call_of_its_own(inputs):
    other = keras.Input((4,))
    return OwnCall(other, dense(4, "one")(other))(inputs)


@pytest.mark.parametrize("make", [called_twice, with_a_call_of_its_own, lambda inputs: Subclassed()(inputs)])
def test_subclassed_and_repeated_models_are_not_opened(make):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, make(inputs))
    assert all("/" not in call.name for call in ModelCalls(model).calls)


class Block(keras.layers.Layer):
    """Says nothing about `training`; what is in it asks the model."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.99)

    def call(self, inputs):
        return self.dropout(inputs)


def test_inner_layers_receive_training_flag():
    inputs = keras.Input((100,))
    calls = ModelCalls(keras.Model(inputs, Block()(inputs)))
    for training in (True, False):
        values = {calls.inputs[0]: tf.ones([1, 100])}
        calls.run(calls.calls, values, training=training)
        is_dropped = bool(tf.reduce_any(values[calls.outputs[0]] == 0))
        assert is_dropped == training
