"""A worker has, to the last bit, what its server thinks that it has; whatever is lost or comes twice."""

import contextlib

import keras
import numpy as np
import pytest

from tests.parameter_server.differing import SHAPES, Pair, distance
from tests.parameter_server.serving import DEADLINE, serving
from tfdist import compression as c
from tfdist.compression.policy import as_policy
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session

METHODS = [c.BFloat16(), c.TopK(0.1), c.Int8(), c.QSGD(levels=4), c.ErrorFeedback(c.RandomK(0.2)), c.PowerSGD(2)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_worker_and_server_copies_are_equal_and_converge(method):
    pair = Pair(method)
    worker_values = pair.take(pair.push())
    assert distance(worker_values, pair.values) == 0, "at first they are whole"
    for _ in range(20):
        pair.move()
        worker_values = pair.take(pair.push())
        pair.assert_equal()
    first = distance(worker_values, pair.values)
    assert first > 0
    for _ in range(60):
        worker_values = pair.take(pair.push())
        pair.assert_equal()
    assert distance(worker_values, pair.values) < 0.2 * first, "the parameters rest, and the worker's follow"


def test_nan_parameters_are_sent_uncompressed():
    pair = Pair(c.Int8())
    pair.take(pair.push())
    finite = pair.values[0]
    pair.values[0] = np.full(SHAPES[0], np.nan, np.float32)
    assert np.isnan(pair.take(pair.push())[0]).all()
    pair.values[0] = finite
    pair.take(pair.push())
    np.testing.assert_array_equal(pair.take(pair.push())[0], finite)


def test_missing_or_damaged_differences_raise():
    pair = Pair(c.Int8())
    pair.take(pair.push())
    lost, later = pair.push(), pair.push()
    with pytest.raises(ValueError, match="difference 2 came after difference 0"):
        pair.take(later)
    with pytest.raises(ValueError, match="a difference cannot be decoded"):
        pair.worker.received(lost.kinds, [*lost.arrays[:-1], np.zeros(3, np.uint8)], lost.copy)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_compressed_pulls_converge_with_several_servers(prefetch):
    """Also after a reading, and after a connection that was lost."""
    policy, generator = as_policy(c.TopK(0.2)), np.random.default_rng(3)
    shapes = [(500, 8), (9,)]
    model = Model(["a", "b"], shapes, [np.dtype(np.float32)] * 2, 2, [True, True], "SGD")
    values = [generator.normal(size=shape).astype("float32") for shape in shapes]
    held = [HeldRows("a", 0, 500, 500), HeldRows("b", 0, 9, 9)]
    optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.1))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(pull_compression=policy)) for _ in range(2)]
        connections = [Connection(server.address, "ps", DEADLINE) for server in servers]
        session = Session(connections, 0, model, (), prefetch, policy)
        stack.callback(session.close)
        session.begin(held, optimizer, lambda: TrainingState(values, [{}] * 2))
        for step in range(60):
            if step < 30:
                given = [generator.normal(size=shape).astype("float32") for shape in shapes]
            else:
                given = [np.zeros(shape, np.float32) for shape in shapes]
            if step == 10:
                session.pull()
            if step == 20:
                servers[0].lost(0)
            parts = [model.part_of(server, TrainingState(given)).values for server in range(2)]
            session.step([
                PushedGradients(("dense",) * len(part), shapes.layout().vectors(part))
                for shapes, part in zip(model.shapes, parts, strict=True)
            ])  # fmt: skip
        session._finish()
        for replica in session._replicas:
            replica.take()
        followed = session.values()
        session.pull()
        for value, newest in zip(followed, session.values(), strict=True):
            np.testing.assert_allclose(value, newest, atol=1e-4)
