import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS, arrays_of, eagerly, in_a_graph
from tfdist.engine.exchange import Exchange
from tfdist.errors import MismatchError
from tfdist.runtime import world

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.int8, np.int64, np.bool_, np.complex64]
WAYS = pytest.mark.parametrize("call", [eagerly, in_a_graph])


def exchanged(group, call, method, *tensors, **arguments):
    """What a method of the group's `Exchange` returns, as arrays."""
    result = call(lambda *given: getattr(Exchange(group), method)(*given, **arguments), *map(tf.constant, tensors))
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result)


def rows_of(rank, dtype=np.float32):
    """None on rank 0, one more on each other."""
    return (np.arange(rank * 2).reshape(rank, 2) % 2).astype(dtype)


def together(size, dtype=np.float32):
    return np.concatenate([rows_of(rank, dtype) for rank in range(size)])


@BOTH_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_takes_any_number_of_rows(ranks, size, call, dtype):
    for gathered in ranks(size)(lambda group: exchanged(group, call, "all_gather", rows_of(group.rank, dtype))):
        assert gathered.dtype == dtype
        np.testing.assert_array_equal(gathered, together(size, dtype))


@BOTH_WAYS
@pytest.mark.parametrize("axis", [1, -1, -2])
def test_gather_along_another_axis(ranks, size, call, axis):
    def given(rank):
        return np.swapaxes(np.full((rank + 1, 3, 2), rank), 0, axis)

    expected = np.concatenate([given(rank) for rank in range(size)], axis)
    for gathered in ranks(size)(lambda group: exchanged(group, call, "all_gather", given(group.rank), axis=axis)):
        np.testing.assert_array_equal(gathered, expected)


@BOTH_WAYS
def test_gather_of_strings(ranks, size, call):
    """Strings have any length, also 0, and hold any bytes; a rank may have no strings."""
    given = [[[b"", b"\x00\xff"]], [], [["grüße".encode(), b"a" * 1000]] * 2][:size]

    def work(group):
        return exchanged(group, call, "all_gather", np.array(given[group.rank], object).reshape(-1, 2)).tolist()

    for gathered in ranks(size)(work):
        assert gathered == [row for rows in given for row in rows]


@BOTH_WAYS
@arrays_of(DTYPES, [(), (0, 2), (5, 3)])
def test_broadcast_gives_all_ranks_the_roots_tensor(ranks, size, call, dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, (size, *shape)).astype(dtype)
    for root in range(size):
        for received in ranks(size)(
            lambda group, root=root: exchanged(group, call, "broadcast", values[group.rank], root=root)
        ):
            assert (received.dtype, received.shape) == (dtype, shape)
            np.testing.assert_array_equal(received, values[root])


def test_broadcast_once_raises_for_different_signatures(ranks):
    def work(group, key, signature):
        value = tf.constant([group.rank, 2])
        return Exchange(group).broadcast_once(value, key, signature.format(group.rank)).numpy().tolist()

    both = ranks(2)
    assert both(work, "settings", "the same") == [[0, 2]] * 2
    with pytest.raises(MismatchError, match="other settings: "):
        both(work, "other settings", "of rank {}")


@BOTH_WAYS
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("combine", [np.add, np.maximum])
def test_reduce_scatter_leaves_each_its_rows(ranks, size, call, rows, combine):
    """The first ranks get one more where that does not divide; some none."""

    def given(rank):
        return np.arange(3 * rows).reshape(rows, 3) * (rank + 1)

    expected = np.array_split(combine.reduce([given(rank) for rank in range(size)]), size)
    results = ranks(size)(lambda group: exchanged(group, call, "reduce_scatter", given(group.rank), combine=combine))
    for part, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(part, other)


@BOTH_WAYS
def test_reduce_scatter_by_numbers_of_rows(ranks, size, call):
    """Which only each rank knows of its own; rank 0 gets none."""
    total = sum(range(size))

    def work(group):
        given = np.full((total, 2), group.rank + 1.0)
        return exchanged(group, call, "reduce_scatter", given, rows=tf.constant(group.rank))

    for rank, part in enumerate(ranks(size)(work)):
        np.testing.assert_array_equal(part, np.full((rank, 2), sum(range(size + 1))))


@BOTH_WAYS
def test_means_of_halves_do_not_overflow_on_any_rank(ranks, size, call):
    """The first rows do, and their ranks alone would notice."""

    def work(group):
        given = np.ones((size, 2), np.float16)
        given[0] = 60_000
        return exchanged(group, call, "reduce_scatter", given, mean=True)

    for rank, part in enumerate(ranks(size)(work)):
        np.testing.assert_allclose(part, np.full((1, 2), 1 if rank else 60_000), rtol=1e-3)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.bool_])
def test_all_to_all_sends_each_its_rows(ranks, size, call, dtype):
    """Numbers of rows differ, also from those that come back, and some are zero."""

    def splits_of(rank):
        return np.array([(rank * rank + 2 * other + 1) % 4 for other in range(size)])

    def given(rank):
        return np.repeat(np.arange(size) * rank, splits_of(rank)).astype(dtype)[:, np.newaxis]

    results = ranks(size)(lambda group: exchanged(group, call, "all_to_all", given(group.rank), splits_of(group.rank)))
    for rank, (rows, counts) in enumerate(results):
        np.testing.assert_array_equal(counts, [splits_of(other)[rank] for other in range(size)])
        np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(size) * rank, counts).astype(dtype))


@WAYS
@pytest.mark.parametrize("splits", [[3], [1, 1], [-1, 4]])
def test_invalid_splits_raise(ranks, call, splits):
    words = r"one number of rows for each of the 2 ranks, 3 in total"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=words):
        exchanged(ranks(2).groups[0], call, "all_to_all", np.ones(3), splits)


@BOTH_WAYS
def test_ranks_leave_a_barrier_after_all_have_entered(ranks, size, call):
    everyone = ranks(size)
    come = []

    def work(group):
        come.append(group.rank)
        call(lambda: Exchange(group).barrier() or tf.constant(0))
        return len(come)

    assert everyone(work) == [size] * size


def test_static_shapes_in_graphs():
    """As much is known of a result as does not depend on other processes."""
    exchange = Exchange(world.current().group)
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def trace(x):
        for result in (
            exchange.all_gather(x),
            exchange.all_gather(x, axis=1),
            exchange.broadcast(x),
            exchange.reduce_scatter(x),
            exchange.all_to_all(x, [tf.shape(x)[0]])[0],
        ):
            shapes.append(result.shape.as_list())

    trace.get_concrete_function()
    assert shapes == [[None, 4], [None, None], [None, 4], [None, 4], [None, 4]]


@WAYS
def test_single_process_gets_its_own_tensors(call):
    group, given = world.current().group, np.arange(6.0).reshape(3, 2)
    for method in ("all_gather", "broadcast", "reduce_scatter"):
        np.testing.assert_array_equal(exchanged(group, call, method, given), given)
    rows, counts = exchanged(group, call, "all_to_all", given, [3])
    np.testing.assert_array_equal(rows, given)
    assert counts.tolist() == [3]


@pytest.mark.parametrize("method", ["all_gather", "reduce_scatter", "all_to_all"])
def test_scalars_and_tensors_of_unknown_rank_raise(method):
    collective = getattr(Exchange(world.current().group), method)
    more = [[1]] if method == "all_to_all" else []
    with pytest.raises(ValueError, match=f"{method} needs a tensor of at least one dimension; got a scalar"):
        collective(tf.constant(1.0), *more)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def trace(x):
        collective(x, *more)

    with pytest.raises(ValueError, match=f"{method} must know how many dimensions .* call tf.ensure_shape"):
        trace.get_concrete_function()


@pytest.mark.parametrize("axis", [2, -3])
def test_invalid_axis_raises(axis):
    with pytest.raises(ValueError, match=f"one of the tensor's 2 dimensions; got {axis}"):
        Exchange(world.current().group).all_gather(tf.ones([2, 2]), axis=axis)


def test_compare_returns_differing_values_of_all_ranks(ranks):
    def work(group):
        exchange = Exchange(group)
        same = exchange.compare("facts", {"a": "1", "b": "größer"})
        some = exchange.compare("facts", {"a": "1", "b": "x" * group.rank, "c": str(group.rank == 1)})
        return same, some, exchange.compare("facts", {"a": "2", "b": ""})

    for same, some, after in ranks(3)(work):
        assert same == after == {}
        assert some == {"b": ["", "x", "xx"], "c": ["False", "True", "False"]}
