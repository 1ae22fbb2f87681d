import numpy as np
import pytest

from tfdist.compression import sparse
from tfdist.errors import PayloadError

rng = np.random.default_rng(0)


@pytest.mark.parametrize("indices", [[], [0], [99], [3, 4, 70], list(range(100))])
def test_unpacked_indices_and_values_equal_packed_ones(indices):
    indices = np.array(indices, np.int64)
    values, signs = rng.standard_normal(indices.size).astype(np.float32), np.packbits(indices % 2 == 0)
    unpacked, rest = sparse.unpack(sparse.pack(indices, 100, values, signs), 100)
    np.testing.assert_array_equal(unpacked, indices)
    np.testing.assert_array_equal(rest[: values.nbytes].view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(rest[values.nbytes :], signs)


def test_arrays_of_several_dtypes_follow_each_other():
    about = np.array([1.5]), np.array([7], np.int16), np.array([2, 3], np.uint8)
    _, rest = sparse.unpack(sparse.pack(np.array([5]), 10, *about), 10)
    assert rest.tobytes() == b"".join(array.tobytes() for array in about)


@pytest.mark.parametrize("length", [0, 7])
def test_body_shorter_than_its_length_field_raises(length):
    body = sparse.pack(np.array([5]), 10)
    with pytest.raises(PayloadError, match=f"at least 8 bytes; got {length}"):
        sparse.unpack(body[:length], 10)


def test_a_false_length_is_an_error():
    body = sparse.pack(np.flatnonzero(rng.random(1000) < 0.5), 1000, np.ones(3))
    for length in (0, 5, 20):
        damaged = body.copy()
        damaged[:8] = np.frombuffer(np.uint64(length).tobytes(), np.uint8)
        with pytest.raises(PayloadError, match="damaged"):
            sparse.unpack(damaged, 1000)


def test_index_beyond_the_vector_raises():
    with pytest.raises(PayloadError, match="between 0 and 8; got 9 to 9"):
        sparse.unpack(sparse.pack(np.array([9]), 10), 9)


def test_values_of_wrong_byte_count_raise():
    data = np.array([1.5, -2], np.float32).view(np.uint8)
    np.testing.assert_array_equal(sparse.values_of(data, np.dtype(np.float32), 2), [1.5, -2])
    np.testing.assert_array_equal(sparse.values_of(np.append(data, data)[3:11], np.dtype(np.uint8), 8).size, 8)
    for count in (1, 3):
        with pytest.raises(PayloadError, match=f"{count} values of float32 were expected; got 8 bytes"):
            sparse.values_of(data, np.dtype(np.float32), count)


def test_scatter_combines_or_overwrites_at_indices():
    indices, values = np.array([1, 3]), np.array([10.0, 20.0])
    out = np.ones(5)
    sparse.scatter(out, indices, values, np.subtract)
    assert out.tolist() == [1, -9, 1, -19, 1]
    sparse.scatter(out, indices, values, None)
    assert out.tolist() == [0, 10, 0, 20, 0]


@pytest.mark.parametrize("elements", [0, 1, 1 << 14, (1 << 14) + 1, 50_000])
@pytest.mark.parametrize("bound", [0.0, 0.5, 10.0])
def test_at_least_equals_numpy_across_segments(elements, bound):
    """Across the segments that are processed one by one."""
    vector = rng.standard_normal(elements).astype(np.float32)
    indices = sparse.at_least(vector, bound)
    assert indices.dtype == np.int64
    np.testing.assert_array_equal(indices, np.flatnonzero(np.abs(vector) >= bound))


def test_at_least_counts_both_signs_and_the_bound_itself():
    assert sparse.at_least(np.array([1.0, -1.0, 0.99, -2.0, 0.0]), 1.0).tolist() == [0, 1, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_are_never_among_the_largest(dtype):
    """Denormal numbers are; and -0.0 is a zero."""
    smallest = np.finfo(dtype).smallest_subnormal
    for size in (20, 20_000):
        vector = np.zeros(size, dtype)
        vector[[2, 7, 11]] = smallest, -smallest, -0.0
        for count in (2, 5, size):
            assert sparse.largest(vector, count).tolist() == [2, 7]
        assert sparse.largest(vector, 1).size == 1


def test_largest_is_exact_for_an_unrepresentative_sample():
    """All large elements are outside the sample, or all are in it."""
    elements, count = 1 << 17, 100
    stride = max(8, elements // sparse._SAMPLE) | 1
    for place in (0, 1):
        vector = np.full(elements, 1e-3, np.float32)
        expected = np.arange(place, place + stride * count, stride)
        vector[expected] = -1.0
        np.testing.assert_array_equal(sparse.largest(vector, count), expected)
        more = sparse.largest(vector, 2 * count)  # of which half are among those that a sample may not meet
        assert more.size == 2 * count
        assert set(expected) <= set(more.tolist())


@pytest.mark.parametrize("elements", [10, 5000, 600_000])
@pytest.mark.parametrize("values", ["normal", "equal", "few", "heavy"])
def test_the_largest_are_exactly_the_largest(elements, values):
    vector = {
        "normal": lambda: rng.standard_normal(elements),
        "equal": lambda: np.ones(elements),
        "few": lambda: (rng.random(elements) < 0.001).astype(float),
        "heavy": lambda: rng.standard_cauchy(elements),
    }[values]().astype(np.float32)
    for count in (1, elements // 100, elements // 3, elements):
        indices = sparse.largest(vector, count)
        assert (np.diff(indices) > 0).all()
        magnitudes = np.sort(np.abs(vector))[::-1][:count]
        magnitudes = magnitudes[magnitudes > 0]
        np.testing.assert_array_equal(np.sort(np.abs(vector[indices]))[::-1], magnitudes)
