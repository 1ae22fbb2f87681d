"""A worker has, to the last bit, what its server thinks that it has; whatever is lost or comes twice."""

import contextlib

import keras
import ml_dtypes
import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, serving
from tfdist import compression as c
from tfdist.compression.policy import as_policy
from tfdist.parameter_server.protocol.differences import ParameterDecoder, ParameterEncoder
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push, WorkerValues
from tfdist.parameter_server.protocol.packing import VariableSpec
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session

SHAPES = [(100, 60), (7,), (90, 50)]
DTYPES = [np.dtype(np.float32), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
METHODS = [c.BFloat16(), c.TopK(0.1), c.Int8(), c.QSGD(levels=4), c.ErrorFeedback(c.RandomK(0.2)), c.PowerSGD(2)]


class Pair:
    """A server's and a worker's side, and the newest parameters."""

    def __init__(self, policy, seed=0):
        shapes = Shapes(SHAPES, DTYPES)
        whole = [VariableSpec(f"v{place}", shape) for place, shape in enumerate(SHAPES)]
        self.shapes = shapes
        self.server = ParameterEncoder(as_policy(policy), whole, shapes)
        self.worker = ParameterDecoder(as_policy(policy), whole, shapes)
        self.generator = np.random.default_rng(seed)
        kinds = zip(SHAPES, DTYPES, strict=True)
        self.values = [self.generator.normal(size=shape).astype(dtype) for shape, dtype in kinds]
        self.sequence = 0

    def move(self, size=0.1):
        self.values = [
            (value + size * self.generator.normal(size=value.shape)).astype(value.dtype) for value in self.values
        ]

    def push(self, sequence=None, rows=()):
        if sequence is None:
            sequence, self.sequence = self.sequence, self.sequence + 1
        message = Push(1, 0, 1, sequence, sequence, 0, 1.0, has=WorkerValues(None, rows, self.worker.generation))
        values = PushedGradients(("dense",) * 3, self.shapes.layout().vectors(self.values))
        return self.server.answered(message, values)

    def take(self, answered):
        received = self.worker.received(answered.kinds, answered.arrays, answered.copy)
        return list(self.shapes.layout().arrays(received.arrays).values())

    def assert_equal(self, rows=()):
        has = self.server._records[0].has
        assert has.keys() <= self.worker._has.keys()
        for place, array in has.items():
            np.testing.assert_array_equal(array, self.worker._has[place])


def distance(arrays, values):
    pairs = zip(arrays, values, strict=True)
    return sum(float(np.abs(array.astype(np.float64) - other.astype(np.float64)).sum()) for array, other in pairs)


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


def test_compressed_difference_is_smaller_than_whole_parameters():
    pair = Pair(c.TopK(0.01))
    whole = pair.push()
    pair.take(whole)
    pair.move()
    assert sum(array.nbytes for array in pair.push().arrays) < 0.1 * sum(array.nbytes for array in whole.arrays)


def test_a_push_that_comes_again_gets_the_same_answer():
    pair = Pair(c.Int8())
    pair.take(pair.push())
    pair.move()
    answers = [pair.push(), pair.push()]  # two may be under way
    pair.move()
    for sequence, answer in zip((1, 2), answers, strict=True):
        assert pair.push(sequence) is answer
        pair.take(answer)
    assert pair.push(0).copy is None, "nobody waits for this one any more"
    pair.take(pair.push())
    pair.assert_equal()


def test_whole_parameters_are_sent_after_state_is_lost():
    pair = Pair(c.TopK(0.1))
    for doubt in (lambda: pair.server.forget(0), pair.worker.forget):
        for _ in range(3):
            pair.move()
            pair.take(pair.push())
        doubt()
        under_way = [pair.push(), pair.push()]
        assert [answer.copy[1] for answer in under_way] == [0, 1]
        worker_values = pair.take(under_way[0])
        assert distance(worker_values, pair.values) == 0
        pair.take(under_way[1])
        pair.assert_equal()


def test_nan_parameters_are_sent_uncompressed():
    pair = Pair(c.Int8())
    pair.take(pair.push())
    finite = pair.values[0]
    pair.values[0] = np.full(SHAPES[0], np.nan, np.float32)
    assert np.isnan(pair.take(pair.push())[0]).all()
    pair.values[0] = finite
    pair.take(pair.push())
    np.testing.assert_array_equal(pair.take(pair.push())[0], finite)


def test_uncompressed_and_sparse_variables_are_sent_whole():
    pair = Pair(c.by_name({"v0": None}, otherwise=c.TopK(0.1)))
    pair.take(pair.push(rows=(2,)))
    pair.move()
    assert pair.push(rows=(2,)).kinds == ("dense", "packed", "dense")


def test_a_schedule_goes_by_the_workers_steps():
    pair = Pair(c.Schedule({0: None, 2: c.Int8()}))
    kinds = []
    for _ in range(4):
        pair.move()
        answer = pair.push()
        kinds.append(answer.kinds)
        pair.take(answer)
        pair.assert_equal()
    assert kinds == [("dense",) * 3] * 2 + [("packed", "dense", "packed")] * 2


@pytest.mark.parametrize("method", [c.DeepGradientCompression(0.01)])
def test_methods_that_cannot_encode_differences_raise(method):
    pair = Pair(method)
    pair.push()
    with pytest.raises(ValueError, match="cannot compress with DeepGradientCompression"):
        pair.push()


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
