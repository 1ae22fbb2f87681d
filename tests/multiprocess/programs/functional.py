"""The functional interface, eagerly and in graphs: values, gradients, groups, joining. From 2 processes on."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tfdist

tfdist.init(algorithm="auto")
rank, size = tfdist.rank(), tfdist.size()
everyone = range(size)


def equal(found, expected):
    np.testing.assert_allclose(tf.convert_to_tensor(found).numpy(), expected, rtol=1e-6)


def rows_of(owner):
    """What a rank gives where ranks may give different numbers of rows."""
    return np.arange(2.0 * (owner + 1)).reshape(owner + 1, 2) + 100 * owner


def values(call):
    """Every collective, called by ``call(function, *tensors)``."""
    x = tf.constant([1.0 + rank, 2.0 - rank, 3.0])
    stacked = np.stack([[1.0 + r, 2.0 - r, 3.0] for r in everyone])
    for op, reduce in {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}.items():
        equal(call(lambda v, op=op: tfdist.all_reduce(v, op), x), reduce(stacked, axis=0))
    equal(call(lambda v: tfdist.all_reduce(v), tf.constant(2 * rank)), size - 1)
    nested = call(lambda v: tfdist.all_reduce({"a": v, "b": (v * 2, tf.cast(v, tf.bfloat16))}, "sum"), x)
    equal(nested["b"][0], 2 * stacked.sum(0))
    assert nested["b"][1].dtype == tf.bfloat16
    equal(tf.cast(nested["b"][1], tf.float32), stacked.sum(0))
    sparse = call(
        lambda v: tf.convert_to_tensor(tfdist.all_reduce(tf.IndexedSlices(v[None], [rank], [1000, 3]), "mean")), x
    )
    equal(sparse[:size], stacked / size)
    gathered = call(lambda v: tfdist.all_gather(v), tf.constant(rows_of(rank)))
    equal(gathered, np.concatenate([rows_of(r) for r in everyone]))
    equal(call(lambda v: tfdist.all_gather(v, axis=1), x[None]), stacked.reshape(1, -1))
    matrix = tf.reshape(tf.range(2 * size + 2), (size + 1, 2)) * (rank + 1)
    total = np.arange(2 * size + 2).reshape(size + 1, 2) * sum(r + 1 for r in everyone)
    shares = np.array_split(total, size)
    equal(call(lambda v: tfdist.reduce_scatter(v, "sum"), matrix), shares[rank])
    equal(call(lambda v: tfdist.broadcast(v, root_rank=size - 1), x), stacked[-1])
    given = tf.constant([10.0 * rank + target for target in everyone])
    equal(call(lambda v: tfdist.all_to_all(v), given), [10.0 * source + rank for source in everyone])
    splits = [(rank + target) % 3 for target in everyone]
    taken, counts = call(lambda v: tfdist.all_to_all(v, splits), tf.ones([sum(splits), 2]) * rank)
    equal(counts, [(source + rank) % 3 for source in everyone])
    equal(taken[:, 0], np.repeat(list(everyone), [(source + rank) % 3 for source in everyone]))
    call(lambda v: (tfdist.barrier(), v)[1], x)


def gradients(call):
    x = tf.Variable(tf.ones([2, 2]) * (rank + 1))

    def gradient(function):
        def compute(_):
            with tf.GradientTape() as tape:
                y = function(x)
            return tape.gradient(y, x, output_gradients=tf.ones_like(y) * (rank + 1))

        return call(compute, tf.constant(0))

    total = size * (size + 1) / 2
    equal(gradient(lambda v: tfdist.all_reduce(v, "sum")), np.full((2, 2), total))
    equal(gradient(lambda v: tfdist.all_reduce(v, "mean")), np.full((2, 2), total / size))
    equal(gradient(lambda v: tfdist.all_gather(v, axis=1)), np.full((2, 2), total))
    equal(gradient(lambda v: tfdist.broadcast(v, 0)), np.full((2, 2), total if rank == 0 else 0))
    owners = np.concatenate([np.full(len(part), r + 1) for r, part in enumerate(np.array_split(np.arange(2), size))])
    equal(gradient(lambda v: tfdist.reduce_scatter(v, "sum")), np.stack([owners, owners], 1))
    splits = [2 * (target == (rank + 1) % size) for target in everyone]
    equal(gradient(lambda v: tfdist.all_to_all(v, splits)[0]), np.full((2, 2), (rank + 1) % size + 1))


def groups():
    pairs = [tfdist.Group([0, size - 1])]
    if size > 2:
        pairs.append(tfdist.Group(range(1, size - 1)))
    for group in pairs:
        if rank in group.ranks:
            equal(tfdist.all_reduce(tf.constant(float(rank)), "sum", group), sum(group.ranks))
            in_graph = tf.function(lambda v, group=group: tfdist.all_gather(v, group=group))
            equal(in_graph(tf.constant([rank])), list(group.ranks))
            equal(tfdist.broadcast(tf.constant(rank), group.ranks[-1], group), group.ranks[-1])
            assert group.ranks[group.rank] == rank
        else:
            with pytest.raises(ValueError, match=re.escape(f"rank {rank} is not in Group({list(group.ranks)})")):
                tfdist.barrier(group)


def joining():
    """Every rank has another number of batches; twice, as in two epochs."""
    step = tf.function(lambda v: tfdist.all_reduce(v, "sum"))
    for _ in range(2):
        for batch in range(3 * rank + 1):
            with_data = sum(batch < 3 * r + 1 for r in everyone)
            equal(step(tf.ones([4])), np.full(4, with_data))
            equal(tfdist.all_reduce(tf.constant(1.0), "sum"), with_data)
            equal(tfdist.all_gather(tf.constant([rank])), [r for r in everyone if batch < 3 * r + 1])
            tfdist.barrier()
        assert tfdist.join() == size - 1
    equal(tfdist.all_reduce(tf.constant(1.0), "sum"), size)


def variables():
    made = [tf.Variable(tf.fill([n], float(rank))) for n in (1, 5)]
    tfdist.broadcast_variables(made, root_rank=1)
    equal(made[1], np.ones(5))


def wrong():
    for call, words in (
        (lambda: tfdist.all_reduce(tf.ones(1), "avg"), "op must be one of sum, mean, min, max, product; got 'avg'"),
        (lambda: tfdist.Group([0, 0]), "different ranks"),
        (lambda: tfdist.Group([0, size]), f"from 0 to {size - 1}"),
        (lambda: tfdist.broadcast(tf.ones(1), size), "root_rank must be one of the ranks"),
        (lambda: tfdist.all_to_all(tf.ones(size + 1)), "divide by"),
        (lambda: tfdist.all_gather(tf.constant(1)), "at least one dimension"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


eagerly = lambda function, *tensors: function(*tensors)  # noqa: E731
in_graph = lambda function, *tensors: tf.function(function)(*tensors)  # noqa: E731
for call in (eagerly, in_graph):
    values(call)
    gradients(call)
groups()
variables()
wrong()
joining()
print("DONE", flush=True)
