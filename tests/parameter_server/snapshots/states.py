"""States of parameter servers with known values, for tests of snapshots."""

import functools

import ml_dtypes
import numpy as np

from tfdist.parameter_server.protocol.state import ShardProgress, rows_of_sequences
from tfdist.parameter_server.snapshots.state import PartState, ShardState
from tfdist.sharding import Variable, assign_shards

DIGEST = "0123456789abcdef"
OPTIMIZER = {"class_name": "Adam", "config": {"learning_rate": 1e-3, "clipnorm": None, "limit": float("inf")}}
SHAPES = {
    "embedding/embeddings": (40_000, 2),  # large enough to be split
    "table/embeddings": (70_001, 2),  # in bfloat16; by no number of servers into equal parts
    "dense/kernel": (40, 8),
    "dense/bias": (8,),
    "quantized/kernel": (6, 4),
    "temperature": (),
}
DTYPES = {"table/embeddings": ml_dtypes.bfloat16, "quantized/kernel": ml_dtypes.float8_e4m3fn}


def dtype_of(path):
    return np.dtype(DTYPES.get(path, np.float32))


@functools.cache
def model(version):
    """By path, the value and the slots of each whole variable."""
    random = np.random.default_rng(version)
    variables = {}
    for path, shape in SHAPES.items():
        value, momentum, velocity = (np.asarray(random.normal(size=shape)).astype(dtype_of(path)) for _ in range(3))
        variables[path] = value, {"momentum": momentum, "velocity": velocity}
    variables["dense/kernel"][1]["factor"] = np.float32(random.normal(size=40))  # such as Adafactor's, of another shape
    variables["dense/bias"][1]["product"] = np.array(random.normal(), np.float32)
    return variables


def rows_of(server, servers):
    """The rows that `assign_shards` gives to a server."""
    paths = list(SHAPES)
    variables = [Variable(SHAPES[path], dtype_of(path).itemsize) for path in paths]
    return [(paths[part.variable], part.begin, part.end) for part in assign_shards(variables, servers).shards[server]]


def parts_of(version, rows):
    """Rows of variables after updates."""
    whole = model(version)
    for path, begin, end in rows:
        value, slots = whole[path]
        count = value.shape[0] if value.ndim else 1
        if (begin, end) != (0, count):
            value, slots = value[begin:end], {name: slot[begin:end] for name, slot in slots.items()}
        yield PartState(path, begin, end, count, value, slots)


def shard(server, servers, version=7, digest=DIGEST, sequences=None, counted=None, assigned=3):
    """The state of a server after updates."""
    return ShardState(
        digest=digest,
        optimizer=OPTIMIZER,
        scalars={"iterations": np.array(version, np.int64), "learning_rate": np.array(1 / (1 + version), np.float32)},
        parts=tuple(parts_of(version, rows_of(server, servers))),
        progress=ShardProgress(
            version,
            counted={0: version, 3: 1} if counted is None else counted,
            applied=rows_of_sequences(
                {(0, (1 << 63) - 1): version - 1, (3, 17): 0} if sequences is None else sequences
            ),
            assigned=assigned,
        ),
    )


def assert_same_array(array, other):
    """Bit for bit."""
    assert (array.dtype, array.shape) == (other.dtype, other.shape)
    assert array.tobytes() == other.tobytes()


def assert_same_parts(parts, others):
    for part, other in zip(parts, others, strict=True):
        bounds = (part.path, part.begin, part.end, part.rows)
        assert bounds == (other.path, other.begin, other.end, other.rows)
        assert_same_array(part.value, other.value)
        assert part.slots.keys() == other.slots.keys()
        for name in part.slots:
            assert_same_array(part.slots[name], other.slots[name])


def assert_same(state, other):
    """Two states of servers."""
    assert_same_parts(state.parts, other.parts)
    assert state.scalars.keys() == other.scalars.keys()
    for name in state.scalars:
        assert_same_array(state.scalars[name], other.scalars[name])
    for name in ("digest", "optimizer", "progress"):
        assert getattr(state, name) == getattr(other, name), name
