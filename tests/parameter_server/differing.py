"""Both sides of compressed parameters, without sockets."""

import ml_dtypes
import numpy as np

from tfdist.compression.policy import as_policy
from tfdist.parameter_server.protocol.differences import ParameterDecoder
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push, WorkerValues
from tfdist.parameter_server.protocol.packing import VariableSpec
from tfdist.parameter_server.shard.compressed_answers import CompressedAnswers

SHAPES = [(100, 60), (7,), (90, 50)]
DTYPES = [np.dtype(np.float32), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]


class Pair:
    """A server's and a worker's side, and the newest parameters."""

    def __init__(self, policy, seed=0):
        shapes = Shapes(SHAPES, DTYPES)
        whole = [VariableSpec(f"v{place}", shape) for place, shape in enumerate(SHAPES)]
        self.shapes = shapes
        self.server = CompressedAnswers(as_policy(policy))
        self.server.begin(whole, shapes)
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
        return self.server.encoded(message, values)

    def take(self, answered):
        decoded = self.worker.received(answered.kinds, answered.arrays, answered.copy)
        return list(self.shapes.layout().arrays(decoded.vectors).values())

    def assert_equal(self, rows=()):
        has = self.server._records[0].has
        assert has.keys() <= self.worker._has.keys()
        for place, array in has.items():
            np.testing.assert_array_equal(array, self.worker._has[place])


def distance(decoded, values):
    pairs = zip(decoded, values, strict=True)
    return sum(float(np.abs(actual.astype(np.float64) - value.astype(np.float64)).sum()) for actual, value in pairs)
