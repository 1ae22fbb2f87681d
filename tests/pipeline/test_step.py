"""Gradients of a pipeline are those of the whole model, for every schedule, in one process on several devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pipeline.models import MODELS, SAMPLES, data_of, in_stages, objective_of, of_whole, skips
from tests.sweeps import sweep
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import schedules
from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.stages import Stages
from tfdist.pipeline.step import PipelinedStep

STAGES, PARTS = 3, 4


SCHEDULES = {
    "gpipe": lambda edges: schedules.gpipe(STAGES, PARTS, edges),
    "1f1b": lambda edges: schedules.one_forward_one_backward(STAGES, PARTS, edges),
    "zero_bubble": lambda edges: schedules.zero_bubble(STAGES, PARTS, edges),
    "interleaved": lambda edges: schedules.interleaved(4, PARTS, 2, edges),
}


def pipelined(model, make, devices=None, graph=True, samples=SAMPLES):
    x, y = data_of(model, samples)
    calls = ModelCalls(model)
    stages = in_stages(calls, make([]).stages)
    table = make(stages.edges)

    def step(*tensors):
        batch, objective = objective_of(model, table, PARTS, tensors)
        workers, own_x = range(len(table.rows)), tensors[: len(x)]
        run = PipelinedStep(stages, table, workers, None, batch, own_x, True, objective, devices)
        run.run()
        outputs = [batch.joined(parts) for parts in zip(*run.outputs, strict=True)]
        total = tf.add_n([*objective.losses, *run.added_losses])
        return outputs, total, [run.gradients.of(variable) for variable in model.trainable_variables]

    outputs, loss, gradients = (tf.function(step, autograph=False) if graph else step)(*x, *y)
    return outputs, loss, dict(zip(map(id, model.trainable_variables), gradients, strict=True))


def assert_equal(model, actual, expected):
    for tensor, other in zip(actual[0], expected[0], strict=True):
        np.testing.assert_allclose(tensor, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
    for variable in model.trainable_variables:
        tensor, other = actual[2][id(variable)], expected[2][id(variable)]
        assert type(tensor) is type(other), variable.path
        tensor, other = tf.convert_to_tensor(tensor), tf.convert_to_tensor(other)
        np.testing.assert_allclose(tensor, other, rtol=1e-5, atol=1e-6, err_msg=variable.path)


CASES = [(name, schedule) for name in MODELS for schedule in ("1f1b", "zero_bubble")]
CASES += [(name, schedule) for name in ("skips", "several_outputs", "tied") for schedule in ("gpipe", "interleaved")]


MASKED = "words_inside", "1f1b"
"""Whose results have masks of their own, where those of other models are tensors of the model."""
ALWAYS = [case for place, case in enumerate(CASES) if place % 3 == 0 or case == MASKED]


@pytest.mark.parametrize(("name", "schedule"), [case if case in ALWAYS else sweep(*case) for case in CASES])
def test_gradients_are_those_of_the_whole_model(name, schedule):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    x, y = data_of(model)
    assert_equal(model, pipelined(model, SCHEDULES[schedule]), of_whole(model, x, y))


@pytest.mark.parametrize("schedule", [sweep("1f1b"), "zero_bubble"])
def test_gradients_are_equal_on_devices_eagerly_and_with_few_samples(schedule):
    keras.utils.set_random_seed(0)
    model = skips()
    devices = [f"/device:CPU:{number}" for number in range(STAGES)]
    assert_equal(model, pipelined(model, SCHEDULES[schedule], devices), of_whole(model, *data_of(model)))
    assert_equal(model, pipelined(model, SCHEDULES[schedule], graph=False), of_whole(model, *data_of(model)))
    few = pipelined(model, SCHEDULES[schedule], graph=False, samples=3)
    assert_equal(model, few, of_whole(model, *data_of(model, 3)))


class Recorder(keras.layers.Layer):
    """Notes the stage and the first row of what it is called with, forward and backward, in the order of execution."""

    def __init__(self, stage, notes):
        super().__init__()
        self.stage, self.note = stage, notes.append  # Keras copies lists

    def call(self, inputs):
        def note(kind):
            def noted(x, y):
                self.note((kind, self.stage, int(y[0, 0])))
                return x

            return noted

        @tf.custom_gradient
        def recorded(x):
            def gradient(upstream):
                return tf.ensure_shape(tf.py_function(note("B"), [upstream, x], upstream.dtype), upstream.shape)

            return tf.ensure_shape(tf.py_function(note("F"), [x, x], x.dtype), x.shape), gradient

        return recorded(inputs)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_actions_are_executed_in_the_order_of_the_table(schedule):
    make, notes = SCHEDULES[schedule], []
    recorders = [Recorder(stage, notes) for stage in range(make([]).stages)]
    weight = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)  # wants a gradient
    calls = ModelCalls(model := keras.Sequential([keras.Input((1,)), weight, *recorders]))
    stages = Stages(calls, [2 + stage for stage in range(len(recorders))])
    table = make(stages.edges)

    @tf.function(autograph=False)
    def step(x, y):
        batch, objective = objective_of(model, table, PARTS, [x, y])
        PipelinedStep(stages, table, range(len(table.rows)), None, batch, [x], True, objective).run()

    step(tf.reshape(tf.range(float(PARTS)), [PARTS, 1]), tf.ones([PARTS, 1]))
    for worker, row in enumerate(table.rows):
        executed = [f"{stage}{kind}{number}" for kind, stage, number in notes if table.workers[stage] == worker]
        assert executed == [str(action) for action in row]


def test_forward_only_step_equals_model_without_dropout():
    """As `evaluate` and `predict` need them: without Dropout, with what layers add to the loss."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(8, activity_regularizer="l2")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    (x,), _ = data_of(model)
    calls = ModelCalls(model)
    stages = in_stages(calls, 2)
    batch = MicroBatches(x, PARTS)
    table = schedules.forward_only([0, 1], PARTS, stages.edges)
    run = PipelinedStep(stages, table, [0, 1], None, batch, [x], False)
    run.run()
    np.testing.assert_allclose(batch.joined([output for (output,) in run.outputs]), model(x), rtol=1e-5)
    np.testing.assert_allclose(tf.add_n(run.added_losses), model.losses[0], rtol=1e-5)
