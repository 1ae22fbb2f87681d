"""Tensors that one process each owns: sums go to the owners, and values to all."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import Float16, Int8, by_size
from tfdist.compression.compressor import Compressor
from tfdist.engine import buckets
from tfdist.engine.owned import Owned
from tfdist.errors import MismatchError
from tfdist.sharding import Ownership

SHAPES = [(3, 2), (), (5,), (0,), (4, 1, 2)]
NAMES = [f"tensor {place}" for place in range(len(SHAPES))]


def values_of(rank, dtype="float32"):
    generator = np.random.default_rng(rank)
    return [np.asarray(generator.integers(-9, 9, shape)).astype(dtype) for shape in SHAPES]


def eagerly(function, tensors):
    return [value.numpy() for value in function([tf.constant(tensor) for tensor in tensors])]


def in_a_graph(function, tensors):
    return [value.numpy() for value in tf.function(function)([tf.constant(tensor) for tensor in tensors])]


def sums(group, call, owners, dtype="float32", weight=None):
    own = [place for place, owner in enumerate(owners) if owner == group.rank]
    weight = None if weight is None else weight(group.rank)
    owned = list(map(Ownership, owners))
    summed = call(lambda tensors: Owned(group).sums(tensors, owned, NAMES, weight), values_of(group.rank, dtype))
    assert len(summed) == len(own)
    return dict(zip(own, summed, strict=True))


OWNERS = [(0, 1, 1, 0, 1), (1, 0, 1, 0, 0), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@pytest.mark.parametrize("owners", OWNERS)
def test_each_owner_gets_its_sums(ranks, call, owners):
    results = ranks(2)(functools.partial(sums, call=call, owners=owners))
    together = {place: value for rank in results for place, value in rank.items()}
    for place, (first, second) in enumerate(zip(values_of(0), values_of(1), strict=True)):
        assert together[place].shape == first.shape
        np.testing.assert_array_equal(together[place], first + second)


@pytest.mark.parametrize("limits", [(16 << 20, 1 << 20), (24, 16), (1, 1)])
def test_sums_of_three_ranks_are_right_in_buckets_of_any_size(ranks, monkeypatch, limits):
    plan = functools.partial(buckets.plan, limit=limits[0], alone=limits[1])
    monkeypatch.setattr("tfdist.engine.owned.buckets.plan", plan)
    owners = (2, 0, 2, 1, 0)

    def work(group):
        summed = sums(group, in_a_graph, owners, "float64", weight=lambda rank: tf.constant(0.5 * rank, tf.float64))
        own = [tf.constant(value) for value in summed.values()]
        specs = [tf.TensorSpec(shape, tf.float64) for shape in SHAPES]
        taken = iter(Owned(group).gathered(own, specs, list(map(Ownership, owners)), NAMES))
        return [summed[place] if place in summed else next(taken).numpy() for place in range(len(SHAPES))]

    everyone = ranks(3)(work)
    expected = [0.5 * one + two for one, two in zip(values_of(1, "float64"), values_of(2, "float64"), strict=True)]
    for results in everyone:
        for value, summed in zip(results, expected, strict=True):
            assert value.shape == summed.shape
            np.testing.assert_array_equal(value, summed)


def test_values_without_weight_count_as_zero_even_if_not_finite(ranks):
    def work(group):
        weight = tf.constant(float(group.rank), tf.float64)
        tensor = tf.constant([np.nan, np.inf] if group.rank == 0 else [1.0, 2.0])
        return [value.numpy().tolist() for value in Owned(group).sums([tensor], [Ownership(0)], ["w"], weight)]

    assert ranks(2)(work) == [[[1.0, 2.0]], []]


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@pytest.mark.parametrize("limits", [(16 << 20, 1 << 20), (1, 1)])
def test_compressed_sums_go_to_their_owners(ranks, monkeypatch, call, limits):
    """Small integers, which half precision holds; beside a tensor that is not compressed, and with a weight."""
    plan = functools.partial(buckets.plan, limit=limits[0], alone=limits[1])
    monkeypatch.setattr("tfdist.engine.owned.buckets.plan", plan)
    shapes = [(5, 2), (3,), (4, 2, 2), (2,)]
    owners = [Ownership(None, (0, 2, 2, 5)), Ownership(1), Ownership(None, (0, 1, 3, 4)), Ownership(2)]
    values = [np.arange(np.prod(shape), dtype="float32").reshape(shape) for shape in shapes]
    names = ["kernel", "bias", "other", "scale"]

    def work(group):
        compressor = Compressor(by_size({0: Float16(), 16: Int8(block=1)}), group.rank, group.size, scatters=True)
        compressor.register({name: (name, shape) for name, shape in zip(names, shapes, strict=True)})
        hows = [compressor.tensor(name, value) for name, value in zip(names[:-1], values[:-1], strict=True)]
        weight = tf.constant([0.5, 1.0, 2.0][group.rank], tf.float64)

        def summed(tensors):
            return Owned(group).sums(tensors, owners, names, weight, [*hows, None])

        own = call(summed, [value * (1 + group.rank) for value in values])
        return own, compressor.traffic()

    for rank, (own, traffic) in enumerate(ranks(3)(work)):
        parts = [value[owner.part(rank)] if owner.is_cut else value
                 for value, owner in zip(values, owners, strict=True) if owner.includes(rank)]  # fmt: skip
        for part, total in zip(parts, own, strict=True):
            assert total.shape == part.shape
            np.testing.assert_allclose(total, 8.5 * part, rtol=1e-6)
        assert set(traffic) == set(names[:-1])


def test_other_compression_on_a_rank_is_an_error(ranks):
    def work(group):
        compressor = Compressor(by_size({0: [Float16(), Int8()][group.rank]}), group.rank, group.size, scatters=True)
        compressor.register({"w": ("w", (2, 2))})
        value = tf.zeros([2, 2])
        Owned(group).sums([value], [Ownership(0)], ["w"], compressed=[compressor.tensor("w", value)])

    with pytest.raises(MismatchError):
        ranks(2)(work)


def test_dtypes_travel_apart(ranks):
    dtypes = ["float16", "bfloat16", "float64"]

    def work(group):
        tensors = [tf.cast(tf.fill([2], group.rank + 1.0), dtype) for dtype in dtypes]
        return [(value.dtype.name, value.numpy().astype("float64").tolist()) for value in
                Owned(group).sums(tensors, [Ownership(0)] * 3, dtypes)]  # fmt: skip

    assert ranks(2)(work)[0] == [(dtype, [3.0, 3.0]) for dtype in dtypes]


def test_inputs_are_not_written(ranks):
    def work(group):
        tensor = tf.constant([1.0, 2.0, 3.0])
        Owned(group).sums([tensor], [Ownership(1)], ["w"], tf.constant(0.25, tf.float64))
        Owned(group).gathered([tensor] * group.rank, [tf.TensorSpec([3])], [Ownership(1)], ["w"])
        return tensor.numpy().tolist()

    assert ranks(2)(work) == [[1.0, 2.0, 3.0]] * 2


def test_different_owners_are_an_error(ranks):
    with pytest.raises(MismatchError):
        ranks(2)(lambda group: Owned(group).sums([tf.zeros([2])], [Ownership(group.rank)], ["w"]))


@pytest.mark.parametrize("limits", [(16 << 20, 1 << 20), (1, 1)])
@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_rows_are_owned_by_all(ranks, monkeypatch, call, limits):
    plan = functools.partial(buckets.plan, limit=limits[0], alone=limits[1])
    monkeypatch.setattr("tfdist.engine.owned.buckets.plan", plan)
    shapes = [(5, 2), (3,), (4,)]
    owners = [Ownership(None, (0, 2, 3, 5)), Ownership(1), Ownership(None, (0, 2, 3, 4))]
    values = [np.arange(np.prod(shape), dtype="float32").reshape(shape) for shape in shapes]

    def work(group):
        names = ["kernel", "bias", "scale"]
        given = [value * (1 + group.rank) for value in values]
        own = call(lambda tensors: Owned(group).sums(tensors, owners, names), given)
        specs = [tf.TensorSpec(shape) for shape in shapes]
        return own, call(lambda tensors: Owned(group).gathered(tensors, specs, owners, names), own)

    everyone = ranks(3)(work)
    for rank, (own, taken) in enumerate(everyone):
        parts = [value[owner.part(rank)] if owner.is_cut else value
                 for value, owner in zip(values, owners, strict=True) if owner.includes(rank)]  # fmt: skip
        for part, total in zip(parts, own, strict=True):
            np.testing.assert_array_equal(total, 6 * part)
        others = [value for value, owner in zip(values, owners, strict=True) if owner.owner != rank]
        for value, whole in zip(others, taken, strict=True):
            np.testing.assert_array_equal(whole, 6 * value)
