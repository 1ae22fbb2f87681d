"""Measures how long contiguous calls of a model take together, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.model_parallel.model_calls import ModelCalls, clear_losses, trainable_variables

_ROUNDS = 7
_LEAST_SECONDS = 0.05
"""Least duration of a round, which repeats a step."""


def seconds_of(model_calls: ModelCalls, begin: int, end: int, batch_size: int) -> float:
    """Measures a step of some calls: forward in training mode, and backward to their inputs and weights.

    Measured outside of any strategy, whose variables have a gradient on its replicas only.

    The calls are in one graph, as in training. Calls that are measured one by one take another time, since TensorFlow
    fuses operations, and each run has a cost of its own. Variables get their previous values back.

    Args:
        model_calls: the model's calls.
        begin: index of the first call that is measured.
        end: index after the last call that is measured.
        batch_size: number of samples of a batch. Inputs are random numbers, or zeros if they are integers.

    Returns:
        Seconds of a step, the median of several rounds.
    """
    with ThreadPoolExecutor(1) as thread:  # a new thread is in no strategy's scope
        return thread.submit(_seconds_of, model_calls, begin, end, batch_size).result()


def _seconds_of(model_calls: ModelCalls, begin: int, end: int, batch_size: int) -> float:
    calls = model_calls.calls[begin:end]
    inputs, outputs = model_calls.sources(calls), model_calls.needed_of(begin, end)
    layers = {id(call.operation): call.operation for call in calls}.values()
    variables = trainable_variables(layers)
    changed = [variable for layer in layers for variable in getattr(layer, "non_trainable_variables", ())]
    weights = [variable.value for variable in variables]

    @tf.function
    def step(*values: tf.Tensor) -> list[tf.Tensor]:
        watched = [tensor for tensor in values if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            tensors = dict(zip(inputs, values, strict=True))
            model_calls.run(calls, tensors, training=True)
            targets = [tensors[key] for key in outputs if tensors[key].dtype.is_floating]
        gradients = tape.gradient(targets, [*weights, *watched], unconnected_gradients="zero")
        return [tf.convert_to_tensor(tensor)[:0] if tensor.shape.rank else tensor for tensor in [*gradients, *targets]]

    before = [np.copy(variable.numpy()) for variable in changed]
    try:
        return _median(step, [_random(model_calls.tensors[key], batch_size) for key in inputs])
    finally:
        clear_losses(calls)
        for variable, value in zip(changed, before, strict=True):
            variable.assign(value)


def _random(tensor: Any, batch_size: int) -> tf.Tensor:
    shape = [batch_size if place == 0 and size is None else size for place, size in enumerate(tensor.shape)]
    dtype = tf.as_dtype(tensor.dtype)
    if not dtype.is_floating:
        return tf.zeros(shape, dtype)
    return tf.cast(tf.random.stateless_normal(shape, (0, 0)), dtype)


def _median(step: Callable[..., Any], values: list[tf.Tensor]) -> float:
    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            results = step(*values)
        for result in results[:1]:
            result.numpy()  # waits for a device that works asynchronously
        return time.perf_counter() - begin

    run(2)  # traces, and lets TensorFlow optimize the graph
    times = max(1, round(_LEAST_SECONDS / max(run(1), 1e-6)))
    return statistics.median(run(times) / times for _ in range(_ROUNDS))
