"""Steps of pipelines, a process for each worker: the gradients of its stages, and what the last one makes."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline import models
from tfdist.engine.edges import Edges
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import schedules
from tfdist.pipeline.step import PipelinedStep
from tfdist.pipeline.transport import Transport
from tfdist.runtime import world

tfdist.init()
rank, size, parts = tfdist.rank(), tfdist.size(), 4
edges = Edges(world.current().group)
SCHEDULES = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
    "zero_bubble": schedules.zero_bubble,
    "interleaved": lambda stages, count, between: schedules.interleaved(stages, count, size, between),
}


def check(name, schedule, graph):
    keras.utils.set_random_seed(0)
    model = models.MODELS[name]()
    x, y = models.data_of(model)
    calls = ModelCalls(model)
    stages = models.in_stages(calls, 2 * size if schedule == "interleaved" else size)
    table = SCHEDULES[schedule](stages.count, parts, stages.edges)
    transport = Transport(edges, f"{name} {schedule} {graph}")

    def step(*tensors):
        batch, objective = models.objective_of(model, table, parts, tensors)
        run = PipelinedStep(stages, table, [rank], transport, batch, tensors[: len(x)], True, objective)
        run.run()
        gradients = {key: run.gradients.of(variable) for key, variable in enumerate(model.trainable_variables)}
        outputs = [batch.joined(output_parts) for output_parts in zip(*run.outputs, strict=True)] if run.outputs else []
        return outputs, {key: gradient for key, gradient in gradients.items() if gradient is not None}

    expected_outputs, _, expected = models.of_whole(model, x, y)
    compute = tf.function(step, autograph=False) if graph else step
    for _ in range(2):
        outputs, actual = compute(*x, *y)
        assert len(outputs) == (len(model.outputs) if rank == size - 1 else 0)
        for tensor, other in zip(outputs, expected_outputs if outputs else [], strict=True):
            np.testing.assert_allclose(tensor, other, rtol=1e-5, atol=1e-6)
        homes = {key for key, tensor in enumerate(model.trainable_variables) if is_here(stages, table, tensor)}
        assert actual.keys() == homes, (rank, name)
        for key, gradient in actual.items():
            variable = model.trainable_variables[key]
            if len(stages.homes[id(variable)]) > 1:  # each stage has its own part of the gradient
                continue
            tensor, other = tf.convert_to_tensor(gradient), tf.convert_to_tensor(expected[id(variable)])
            np.testing.assert_allclose(tensor, other, rtol=1e-5, atol=1e-6, err_msg=variable.path)


def is_here(stages, table, variable):
    return any(table.workers[stage] == rank for stage in stages.homes[id(variable)])


for name, schedule in (("skips", "1f1b"), ("words", "gpipe"), ("shared", "zero_bubble"), ("skips", "interleaved")):
    check(name, schedule, True)
check("skips", "1f1b", False)
tfdist.barrier()
print("DONE", flush=True)
