import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import ring


def integers(size, length, dtype, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 5, length).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 1001])
def test_sum_is_exact(size, length):
    buffers = integers(size, length, np.float32)
    expected = np.sum(buffers, axis=0, dtype=np.float64)
    simulate(size, lambda rank: ring.all_reduce(buffers[rank]))
    for buffer in buffers:
        assert (buffer == expected).all()


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int32", "int64", "float16", "float64", "complex64", "complex128", ml_dtypes.bfloat16]
)
def test_sum_keeps_dtype_and_is_exact(dtype):
    buffers = integers(3, 100, dtype)
    expected = np.sum([buffer.astype("complex128") for buffer in buffers], axis=0)
    simulate(3, lambda rank: ring.all_reduce(buffers[rank]))
    for buffer in buffers:
        assert buffer.dtype == np.dtype(dtype)
        assert (buffer.astype("complex128") == expected).all()


def test_sum_is_exact_in_many_segments():
    buffers = integers(4, 1003, np.float64)
    expected = np.sum(buffers, axis=0)
    simulate(4, lambda rank: ring.all_reduce(buffers[rank]), segment_bytes=64)
    for buffer in buffers:
        assert (buffer == expected).all()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_source_is_only_read(size):
    sources = integers(size, 101, np.float32)
    kept = [source.copy() for source in sources]
    results = [np.full(101, np.nan, np.float32) for _ in range(size)]
    for source in sources:
        source.flags.writeable = False
    simulate(size, lambda rank: ring.all_reduce(results[rank], source=sources[rank]))
    for rank in range(size):
        assert (results[rank] == np.sum(kept, axis=0)).all()
        assert (sources[rank] == kept[rank]).all()


def test_result_is_identical_on_all_ranks():
    generator = np.random.default_rng(1)
    buffers = [generator.normal(size=999).astype(np.float32) for _ in range(5)]
    simulate(5, lambda rank: ring.all_reduce(buffers[rank]))
    for buffer in buffers:
        assert buffer.tobytes() == buffers[0].tobytes()


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_bytes_and_messages_are_the_formulas(size):
    length = 120 * size
    buffers = integers(size, length, np.float32)
    _, communicators = simulate(size, lambda rank: ring.all_reduce(buffers[rank]))
    for communicator in communicators:
        assert communicator.bytes_sent == 2 * 4 * length * (size - 1) // size
        assert communicator.messages_sent == 2 * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 200_000])
def test_results_are_finished_on_one_rank_each(size, length):
    """Each chunk once, and in parts that fit into the cache."""

    class Doubling:
        parts, ended = [], []

        def finish(self, part):
            self.parts.append(part.size)
            part *= 2

        def end(self, chunk):
            self.ended.append(chunk.size)

    buffers = integers(size, length, np.float32)
    expected = 2 * np.sum(buffers, axis=0)
    simulate(size, lambda rank: ring.all_reduce(buffers[rank], finish=Doubling()))
    for buffer in buffers:
        assert (buffer == expected).all()
    assert sum(Doubling.parts) == sum(Doubling.ended) == length
    assert max(Doubling.parts, default=0) <= max(1 << 16, length if size == 1 else 0)
    assert len(Doubling.ended) == size


def test_maximum_equals_numpys():
    buffers = integers(3, 50, np.int64)
    expected = np.max(buffers, axis=0)
    simulate(3, lambda rank: ring.all_reduce(buffers[rank], np.maximum))
    assert (buffers[0] == expected).all()
