import functools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS, arrays_of, eagerly, in_a_graph
from tfdist import compression as c
from tfdist.compression.compressor import Compressor
from tfdist.engine import buckets, host_calls
from tfdist.engine.bridge import Bridge
from tfdist.engine.group import ProcessGroup
from tfdist.errors import MismatchError
from tfdist.runtime import world

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.complex64]


def alone():
    return Bridge(world.current().group)


def arrays(tensors):
    return [tensor.numpy() for tensor in tensors]


def reduced(group, call, given, **arguments):
    return arrays(call(lambda *tensors: Bridge(group).all_reduce(tensors, **arguments), *map(tf.constant, given)))


@BOTH_WAYS
def test_sums_keep_dtypes_shapes_and_order(ranks, size, call):
    """Also scalars and tensors without elements; those of one dtype travel in one bucket."""

    def work(group):
        given = [np.full((2, 3), group.rank + 1).astype(dtype) for dtype in DTYPES]
        given += [np.float32(group.rank), np.zeros((0, 4), np.float32), np.ones(5, np.float32)]
        return given, reduced(group, call, given)

    for given, sums in ranks(size)(work):
        assert [array.dtype for array in sums] == [array.dtype for array in given]
        assert [array.shape for array in sums] == [array.shape for array in given]
        for array in sums[: len(DTYPES)]:
            np.testing.assert_array_equal(array.astype(np.complex64), size * (size + 1) / 2)
        assert sums[-3] == sum(range(size))
        np.testing.assert_array_equal(sums[-1], np.full(5, size))


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@arrays_of(DTYPES, [(), (0,), (1, 1)])
def test_single_tensor_is_summed_without_packing(ranks, call, dtype, shape):
    """A single tensor is not packed together with others."""
    for (total,) in ranks(2)(lambda group: reduced(group, call, [np.full(shape, 3).astype(dtype)])):
        assert (total.dtype, total.shape) == (dtype, shape)
        np.testing.assert_array_equal(total, np.full(shape, 6).astype(dtype))


@BOTH_WAYS
def test_every_rank_gets_the_same_bits(ranks, size, call):
    def work(group):
        value = np.random.default_rng(group.rank).standard_normal(10_001).astype(np.float32)
        return value, reduced(group, call, [value])[0]

    results = ranks(size)(work)
    assert len({total.tobytes() for _, total in results}) == 1
    np.testing.assert_allclose(results[0][1], np.sum([value for value, _ in results], axis=0), rtol=1e-4, atol=1e-6)


@BOTH_WAYS
@pytest.mark.parametrize("combine", [np.maximum, np.minimum, np.multiply])
def test_maxima_minima_and_products_equal_numpys(ranks, size, call, combine):
    def given(rank):
        return np.array([rank + 1, -rank, 2])

    expected = functools.reduce(combine, map(given, range(size)))
    for results in ranks(size)(lambda group: reduced(group, call, [given(group.rank)], combine=combine)):
        np.testing.assert_array_equal(results[0], expected)


def test_tensors_of_unknown_static_shape_are_summed(ranks):
    """Such a tensor travels alone, as nobody knows how long it is when buckets are packed."""
    specs = [tf.TensorSpec([None, 2]), tf.TensorSpec(None), tf.TensorSpec([3])]

    def work(group):
        shapes = []

        @tf.function(input_signature=specs)
        def summed(*tensors):
            sums = Bridge(group).all_reduce(tensors)
            shapes.extend(tensor.shape for tensor in sums)
            return sums

        given = [np.full((4, 2), 1.0), group.rank, np.arange(3.0)]
        return [
            array.tolist() for array in arrays(summed(*(tf.constant(value, tf.float32) for value in given)))
        ], shapes

    for sums, shapes in ranks(2)(work):
        assert sums == [[[2, 2]] * 4, 1, [0, 2, 4]]
        assert (shapes[0].as_list(), shapes[1].rank, shapes[2].as_list()) == ([None, 2], None, [3])


@BOTH_WAYS
def test_means_of_halves_and_integers_are_exact(ranks, size, call):
    """Means of integers are rounded towards zero; means of halves do not overflow."""
    given = [np.full(2, 60_000, np.float16), np.array([-7, 7])]
    for halves, integers in ranks(size)(
        lambda group: reduced(group, call, [given[0], given[1] + (group.rank == 0)], mean=True)
    ):
        np.testing.assert_array_equal(halves, given[0])
        np.testing.assert_array_equal(integers, np.trunc((size * given[1] + 1) / size))


@BOTH_WAYS
def test_zero_weight_excludes_nan_of_a_rank(ranks, size, call):
    def work(group):
        given = [np.array([1.0, 2.0]), np.full(3, 4, np.float16)]
        weight = tf.constant(0.5, tf.float64)
        if group.rank == 0:
            given, weight = [np.full_like(array, np.nan) for array in given], tf.constant(0.0, tf.float64)
        return reduced(group, call, given, weight=weight)

    for wide, halves in ranks(size)(work):
        np.testing.assert_array_equal(wide, (size - 1) * np.array([0.5, 1.0]))
        np.testing.assert_array_equal(halves, np.full(3, 2 * (size - 1)))


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_inputs_are_not_written(ranks, call):
    """Two entries of the list may be one tensor, and a weight is not applied to it in place."""

    def work(group):
        given = tf.constant(np.full(20, group.rank + 1.0))
        half = tf.constant(0.5, tf.float64)
        sums = call(lambda tensor: Bridge(group).all_reduce([tensor, tensor], weight=half), given)
        return given.numpy(), arrays(sums)

    for rank, (given, sums) in enumerate(ranks(2)(work)):
        np.testing.assert_array_equal(given, rank + 1)
        np.testing.assert_array_equal(sums, 1.5)


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_compressed_and_plain_tensors_are_summed_together(ranks, call):
    """A third has more decimals than float16 keeps."""

    def work(group):
        compressor = Compressor(c.by_name({"kernel": c.Float16()}), group.rank, group.size)
        compressor.register({"a": ("a/kernel", (40, 50)), "b": ("b/kernel", (50, 40))})
        given = [np.full((40, 50), 1 / 3, np.float32), np.full(7, 1 / 3, np.float32)]
        compressed = [compressor.tensor("a", tf.constant(given[0])), None]
        sums = reduced(group, call, given, compressed=compressed)
        return sums, compressor.traffic()

    for (kernel, bias), traffic in ranks(2)(work):
        assert kernel.shape == (40, 50)
        np.testing.assert_array_equal(kernel, 2 * np.float32(np.float16(1 / 3)))
        np.testing.assert_array_equal(bias, 2 * np.float32(1 / 3))
        assert list(traffic) == ["a/kernel"]


def test_graph_posts_all_buckets_before_waiting(ranks):
    """One host call for each bucket; the last one also waits."""
    large = buckets.ALONE_BYTES // 4
    group, _ = ranks(2).groups
    shapes = [tf.TensorSpec([length]) for length in (large, 3, large, 4)]
    traced = tf.function(lambda *tensors: Bridge(group).all_reduce(tensors)).get_concrete_function(*shapes)
    calls = [operation for operation in traced.graph.get_operations() if operation.type in host_calls.OPERATIONS]
    assert [operation.name.rpartition("/")[2].split("_")[1] for operation in calls] == ["post", "post", "finish"]
    assert {tensor.op for tensor in calls[2].inputs} >= set(calls[:2])


def test_different_shapes_raise_mismatch_error(ranks):
    """In a graph, where keys hold no shapes; eagerly such ranks wait for different keys."""
    both = ranks(2)
    with pytest.raises(tf.errors.OpError, match=r"MismatchError: .* float64 \(2,\)"):
        both(lambda group: reduced(group, in_a_graph, [np.zeros(2 + group.rank)]))
    assert isinstance(both.groups[0].failure or both.groups[1].failure, MismatchError)


def test_pending_call_lists_the_names_of_its_tensors(ranks):
    engine = ranks(2).groups[0].engine
    bridge = Bridge(ProcessGroup(engine))
    bridge._posting._collect = lambda handle: np.zeros(5, np.float32)  # the other rank does not come
    bridge.all_reduce([tf.zeros([2]), tf.zeros([3])], names=["a/kernel", "a/bias"])
    assert [pending.contents for pending in engine.under_way()] == ["a/kernel, a/bias"]


def test_all_reduce_of_no_tensors_returns_an_empty_list(ranks):
    group = ranks(2).groups[0]
    assert Bridge(group).all_reduce([]) == []
    assert group.engine.statistics.collectives == 0


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_single_process_communicates_nothing(call):
    group = world.current().group
    before = group.engine.statistics.collectives
    given = [np.array([1.0, np.nan]), np.array([3, 4], np.int8), np.array([True, False])]
    for array, expected in zip(reduced(group, call, given, mean=True), given, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert group.engine.statistics.collectives == before


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_single_process_applies_the_methods_momentum(call):
    compressor = Compressor(c.DeepGradientCompression(0.01, 0.5))
    compressor.register({"a": ("a/kernel", (40, 50))})
    given = tf.ones([40, 50])
    how = compressor.tensor("a", given)
    for velocity in (1.0, 1.5, 1.75):
        total = call(lambda tensor: alone().all_reduce([tensor], compressed=[how])[0], given)
        assert total.shape == (40, 50)
        np.testing.assert_allclose(total, velocity)


def test_a_weight_is_for_sums_of_floating_point():
    with pytest.raises(ValueError, match="a weight cannot be combined with a mean"):
        alone().all_reduce([tf.zeros(3)], weight=tf.constant(1.0, tf.float64), mean=True)
    with pytest.raises(ValueError, match=r"floating-point or complex tensors; got \['float32', 'int32'\]"):
        alone().all_reduce([tf.zeros(3), tf.zeros(3, tf.int32)], weight=tf.constant(1.0, tf.float64))
