"""The order of operations of a graph that may wait for other processes: the one in which they are traced.

If processes waited in different orders, they would wait for each other for ever, once their waits hold all of
TensorFlow's threads.

TensorFlow keeps an order of what uses the same resource, also where some of it is in conditionals, loops, or functions
that the graph calls. So all of these operations use one resource. There is another order, of what has an effect and
uses no resource, as assertions and `tf.print` do: operations that do nothing join the two. There is none in the
gradient of a function, where each operation depends on the earlier ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.private import graphs
from tfdist.tensors import HOST


@contextlib.contextmanager
def in_order() -> Iterator[list[tf.Tensor]]:
    """Context in which an operation is traced, or called, that may wait for other processes.

    Yields:
        The handle of a resource, which the operation must have as an input; nothing for an eager call.
    """
    if tf.executing_eagerly():
        yield []
        return
    graph = tf.compat.v1.get_default_graph()
    handle = _handle_in(graph)
    if not graphs.keeps_order(graph):
        with tf.control_dependencies(handle.consumers()):
            yield [handle]
        return
    with tf.device(HOST):
        before = tf.timestamp()
    with tf.control_dependencies([before]):
        yield [handle]
    with tf.control_dependencies(handle.consumers()[-1:]), tf.device(HOST):
        tf.timestamp()


def _handle_in(graph: Any) -> tf.Tensor:
    if graphs.is_branch_or_loop(graph):  # where gradients may only capture what the graph around them has
        return graphs.captured(graph, _handle_in(graph.outer_graph))
    with graph.as_default():
        return graphs.captured(graph, _handle())


@functools.cache
def _handle() -> tf.Tensor:
    with tf.init_scope(), tf.device(HOST):
        return tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name="tfdist_order")
