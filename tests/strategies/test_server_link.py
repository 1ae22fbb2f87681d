"""An optimizer on parameter servers against the same optimizer alone; the servers run on threads."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tfdist.parameter_server.client import Connection
from tfdist.parameter_server.session import Session
from tfdist.strategies.server_link import Link

SHAPES = [(6, 3), (3,), (5, 2)]


def variables():
    generator = np.random.default_rng(1)
    return [keras.Variable(generator.normal(size=shape).astype("float32"), name=f"v{len(shape)}") for shape in SHAPES]


def gradients(step):
    """A dense one, none in every other step, and a sparse one with an index that occurs twice."""
    generator = np.random.default_rng(step)
    dense = [tf.constant(generator.normal(size=shape).astype("float32")) for shape in SHAPES[:2]]
    rows = tf.constant(generator.normal(size=(3, 2)).astype("float32"))
    return [
        dense[0],
        dense[1] if step % 2 else None,
        tf.IndexedSlices(rows, tf.constant([4, 0, 4]), tf.constant([5, 2])),
    ]


@contextlib.contextmanager
def linked(optimizer, servers=2, is_chief=True):
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving()) for _ in range(servers)]
        made = variables()
        optimizer.build(made)

        def link(worker=0, is_chief=True, own=None):
            connections = [Connection(server.address, "ps", DEADLINE) for server in running]
            paths = [f"{place}" for place in range(3)]
            session = Session(connections, worker, paths, SHAPES, [np.dtype(np.float32)] * 3, splits=False)
            link = Link(session, optimizer, own or made, is_chief)
            stack.callback(link.close)
            return link

        yield link, made


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: keras.optimizers.Adam(0.05)])
def test_updates_are_those_of_the_optimizer(make, in_graph):
    expected, alone = variables(), make()
    alone.build(expected)
    for step in range(4):
        alone.apply(gradients(step), expected)
    optimizer = make()
    with linked(optimizer) as (link, made):
        one = link()
        for step in range(4):
            update = tf.function(one.update) if in_graph else one.update
            update(gradients(step))
        for variable, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        assert int(optimizer.iterations) == 4


def test_a_worker_begins_with_the_chiefs_values_and_sees_its_updates():
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief = link()
        own = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        worker = link(1, is_chief=False, own=own)
        for one, other in zip(own, made, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        chief.update([tf.ones(shape) for shape in SHAPES])
        worker.update([tf.zeros(shape) for shape in SHAPES])
        for one, other in zip(own, made, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_the_learning_rate_of_the_chief_counts():
    optimizer = keras.optimizers.SGD(1.0)
    with linked(optimizer) as (link, made):
        chief, before = link(), made[1].numpy()
        step = tf.function(lambda: chief.update([tf.ones(shape) for shape in SHAPES]))
        step()
        optimizer.learning_rate = 0.25
        step()
        np.testing.assert_allclose(made[1].numpy(), before - 1.25, rtol=1e-6)
