"""Counts over processes in a step, which include a number that only the host knows, in one sum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine import operations
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.operations import Operation
from tfdist.engine.shared_sums import SharedSums
from tfdist.tensors import HOST


class CountReducer:
    """Sums numbers over the processes of a group, or gathers them.

    Args:
        group: the processes that take part.
        contents: description of the counted things, for messages.
        own: function that returns this process's number that only the host knows; called when a collective begins.
        learn: callback, called on the host with the sum of all processes' numbers of ``own``. It may raise
            `StopIteration`, from which the caller gets `tf.errors.OutOfRangeError`. Where `sum` is made in shared
            memory, it is called only if that sum is not 0.
    """

    def __init__(
        self, group: ProcessGroup, contents: str, own: Callable[[], int], learn: Callable[[int], None]
    ) -> None:
        self._group = group
        self._contents = contents
        self._own = own
        self._learn = learn
        self._shared = SharedSums(group)

    @tf.autograph.experimental.do_not_convert
    def sum(self, numbers: tf.Tensor, kept: tf.Variable | None = None) -> tf.Tensor:
        """Sums numbers over all processes; in the graph under construction, or eagerly.

        Args:
            numbers: this process's numbers, one-dimensional int64, less than 2^53 in sum.
            kept: float64 variable that has the number of ``own`` while a graph runs, with which the sum can be made in
                memory that the processes share; not where one could have joined. None has the engine sum.
        """
        if kept is not None and self._shared.is_usable:
            with tf.device(HOST):
                return self._sum_in_memory(numbers, kept)
        return self._call("count", self._sum, numbers, numbers.shape)

    @tf.autograph.experimental.do_not_convert
    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Gathers the numbers of all processes, one row for each process; arguments are the same as of `sum`."""
        return self._call("comparison", self._gather, numbers, [self._group.size, *numbers.shape])

    def _call(self, kind: str, function: Callable[..., np.ndarray], numbers: tf.Tensor, shape: Any) -> tf.Tensor:
        is_eager = tf.executing_eagerly()
        key = f"eager {kind} of {numbers.shape[0]}" if is_eager else call_site(kind, self._group.members)
        spec = tf.TensorSpec(shape, tf.int64)
        try:
            return host_call(functools.partial(function, key), [numbers], spec, f"tfdist_{kind}")
        except StopIteration:  # of an eager call; in a graph TensorFlow does the same
            raise tf.errors.OutOfRangeError(None, None, "the epoch ends") from None

    def _sum_in_memory(self, numbers: tf.Tensor, kept: tf.Variable) -> tf.Tensor:
        terms = tf.concat([tf.cast(numbers, kept.dtype), [kept.read_value()]], 0)
        (totals,) = self._shared.all_reduce([terms], [self._contents], None)

        def learn(total: np.ndarray) -> np.ndarray:
            self._learn(int(total))
            return total

        known = tf.cond(
            totals[-1] > 0,
            lambda: host_call(learn, [totals[-1]], tf.TensorSpec([], totals.dtype), "tfdist_learn"),
            lambda: totals[-1],
        )
        with tf.control_dependencies([known]):
            return tf.cast(totals[:-1], numbers.dtype)

    def _sum(self, key: str, numbers: np.ndarray) -> np.ndarray:
        total = np.append(numbers, self._own())
        if self._group.size > 1:
            plan = operations.all_reduce(total, self._group.choose(total.nbytes))
            self._run(key, plan, f"int64 {total.shape}")
        self._learn(int(total[-1]))
        return total[:-1]

    def _gather(self, key: str, numbers: np.ndarray) -> np.ndarray:
        row = np.append(numbers, self._own())[np.newaxis]
        rows, _ = self._run(key, operations.all_gather_rows(row), f"int64 {row.shape}")
        self._learn(int(rows[:, -1].sum()))
        return np.ascontiguousarray(rows[:, :-1])

    def _run(self, key: str, plan: Operation, signature: str) -> Any:
        return self._group.wait(self._group.post(key, plan, signature, overlaps=False, contents=self._contents))
