import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import arrays_of, eagerly, in_a_graph
from tfdist.engine.edges import Edges, Incoming, Outgoing
from tfdist.errors import MismatchError
from tfdist.runtime import world

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.int8, np.uint16, np.int64, np.bool_, np.complex64]
WAYS = pytest.mark.parametrize("call", [eagerly, in_a_graph])


def spec_of(array):
    return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))


@WAYS
@arrays_of(DTYPES, [(), (0,), (1,), (2, 0, 3), (300, 7)])
def test_a_tensor_arrives_as_it_was_sent(ranks, call, dtype, shape):
    value = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)

    def work(group):
        edges = Edges(group)
        if group.rank == 0:
            call(lambda tensor: edges.send(tensor, 1, "values"), tf.constant(value))
            return value
        return call(lambda: edges.receive(spec_of(value), 0, "values")).numpy()

    _, received = ranks(2)(work)
    assert (received.shape, received.dtype) == (value.shape, value.dtype)
    np.testing.assert_array_equal(received, value)


@WAYS
def test_tensors_are_matched_by_edge_name_and_order(ranks, call):
    """The receiver takes them in another order than the sender sends them, and through other groups."""

    def work(group):
        edges = Edges(group)
        if group.rank == 2:
            for step in range(3):
                for edge in ("a", "b"):
                    edges.send(tf.constant([step, ord(edge)]), 0, edge)
            return None
        if group.rank == 1:
            return None
        spec = tf.TensorSpec([2], tf.int32)
        return [call(lambda edge=edge: edges.receive(spec, 2, edge)).numpy().tolist() for edge in "bbbaaa"]

    received, *_ = ranks(3)(work)
    assert received == [[step, ord(edge)] for edge in "ba" for step in range(3)]


@WAYS
def test_expected_tensors_are_received_before_later_ones(ranks, call):
    """Those that were not expected come behind them."""

    def work(group):
        edges = Edges(group)
        if group.rank == 1:
            for value in range(3):
                edges.send(tf.constant([value]), 0, "x")
            return None
        spec = tf.TensorSpec([None], tf.int32)
        for _ in range(2):
            call(lambda: edges.exchange(expected=[Incoming(spec, 1, "x")]))
        return [int(call(lambda: edges.receive(spec, 1, "x"))[0]) for _ in range(3)]

    assert ranks(2)(work)[0] == [0, 1, 2]


@WAYS
def test_one_exchange_sends_expects_and_receives(ranks, call):
    """A ring in which each receives from both neighbours what they have sent in the same call, and later the rest."""

    def work(group):
        edges = Edges(group)
        others = [rank for rank in range(3) if rank != group.rank]
        value = tf.fill([2, 2], float(group.rank))

        def first():
            return edges.exchange(
                sent=[
                    Outgoing(value + 10.0 * number, rank, f"part {number}") for rank in others for number in range(2)
                ],
                expected=[Incoming(tf.TensorSpec([2, 2]), rank, "part 1") for rank in others],
                received=[Incoming(tf.TensorSpec([None, 2]), rank, "part 0") for rank in others],
            )

        def second():
            return edges.exchange(received=[Incoming(tf.TensorSpec([2, 2]), rank, "part 1") for rank in others])

        assert call(edges.exchange) == []
        return others, [[float(tensor[0, 0]) for tensor in call(part)] for part in (first, second)]

    for others, (first, second) in ranks(3)(work):
        assert first == others
        assert second == [10 + rank for rank in others]


def test_groups_have_edges_of_their_own(ranks):
    """Also where both ends are in all of them."""

    def work(group):
        if group.rank == 2:
            return None
        groups = [group, group.subgroup((0, 1)), group.subgroup((1, 0))]
        if group.rank == 0:
            for value, subgroup in enumerate(groups):
                Edges(subgroup).send(tf.constant([value]), subgroup.members.index(1), "values")
            return None
        with pytest.raises(ValueError, match="between two different ranks; got 1 for both"):
            Edges(groups[2]).send(tf.ones(1), 0, "values")
        spec = tf.TensorSpec([1], tf.int32)
        return [
            int(Edges(subgroup).receive(spec, subgroup.members.index(0), "values")[0]) for subgroup in reversed(groups)
        ]

    assert ranks(3)(work)[1] == [2, 1, 0]


def test_variable_may_change_after_an_unreceived_send(ranks):
    """And a send does not wait for its receiver."""
    first, second = ranks(2).groups
    variable = tf.Variable([1.0, 2.0])
    Edges(first).send(variable, 1, "weights")
    variable.assign([0.0, 0.0])  # TensorFlow gives a variable that is being read another buffer
    np.testing.assert_array_equal(Edges(second).receive(tf.TensorSpec([2]), 0, "weights"), [1, 2])


@WAYS
def test_received_tensor_has_the_senders_number_of_rows(ranks, call):
    def work(group):
        edges = Edges(group)
        if group.rank == 0:
            for rows in (3, 0):
                edges.send(tf.ones([rows, 2]), 1, "rows")
            return None
        shapes = []

        def receive():
            received = edges.receive(tf.TensorSpec([None, 2]), 0, "rows")
            shapes.append(received.shape.as_list())
            return received

        return [call(receive).shape[0] for _ in range(2)], shapes

    _, (rows, shapes) = ranks(2)(work)
    assert rows == [3, 0]
    assert shapes == ([[None, 2]] * 2 if call is in_a_graph else [[3, 2], [0, 2]])


def test_two_ranks_send_to_each_other_before_receiving(ranks):
    """Each of two sends before it receives."""

    def work(group):
        edges, other = Edges(group), 1 - group.rank

        @tf.function
        def swap(tensor):
            edges.send(tensor, other, f"from {group.rank}")
            return edges.receive(tf.TensorSpec([50_000]), other, f"from {other}")

        return swap(tf.fill([50_000], float(group.rank))).numpy()

    for rank, received in enumerate(ranks(2)(work)):
        np.testing.assert_array_equal(received, np.full(50_000, 1 - rank))


def test_another_shape_is_an_error_that_names_the_edge(ranks):
    first, second = ranks(2).groups
    Edges(first).send(tf.ones([3, 2]), 1, "rows")
    with pytest.raises(
        MismatchError, match=r"expected float32 \(None, 5\) along the edge 'rows' from rank 0.*got shape \(3, 2"
    ):
        Edges(second).receive(tf.TensorSpec([None, 5]), 0, "rows")


@pytest.mark.parametrize(("shape", "dtype"), [([3], tf.float64), ([3, 1], tf.float32)], ids=["dtype", "dimensions"])
def test_different_dtype_or_dimensions_raise_before_sending(ranks, shape, dtype):
    def work(group):
        if group.rank == 0:
            Edges(group).send(tf.ones(shape, dtype), 1, "rows")
            return None
        return Edges(group).receive(tf.TensorSpec([3]), 0, "rows")

    with pytest.raises(MismatchError, match="the edge 'rows': "):
        ranks(2)(work)


def test_edges_to_invalid_ranks_raise(ranks):
    edges = Edges(ranks(3).groups[1])
    for other in (-1, 3):
        with pytest.raises(ValueError, match=f"between ranks from 0 to 2; got {other}"):
            edges.send(tf.ones(1), other, "x")
        with pytest.raises(ValueError, match=f"between ranks from 0 to 2; got {other}"):
            edges.receive(tf.TensorSpec([1]), other, "x")
    with pytest.raises(ValueError, match="between two different ranks; got 1 for both"):
        edges.send(tf.ones(1), 1, "x")
    with pytest.raises(ValueError, match="between two different ranks; got 0 for both"):
        Edges(world.current().group).receive(tf.TensorSpec([1]), 0, "x")


def test_dimensions_must_be_known():
    with pytest.raises(ValueError, match="how many dimensions the tensor has; got TensorSpec"):
        Edges(world.current().group).receive(tf.TensorSpec(None), 0, "x")
