"""The functional interface, eagerly and in graphs: values, gradients, groups, joining. From 2 processes on."""

import functools
import logging
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks

import tfdist
from tfdist import initialization

tfdist.init(algorithm="auto")
rank, size = tfdist.rank(), tfdist.size()
everyone = range(size)


def equal(actual, expected):
    np.testing.assert_allclose(tf.convert_to_tensor(actual).numpy(), expected, rtol=1e-6)


def rows_of(owner):
    """What a rank gives where ranks may give different numbers of rows."""
    return np.arange(2.0 * (owner + 1)).reshape(owner + 1, 2) + 100 * owner


def both_ways(check):
    """Makes a check of one that is given how to call a function: eagerly, and in a graph."""

    @functools.wraps(check)
    def checked():
        check(lambda function, *tensors: function(*tensors))
        check(lambda function, *tensors: tf.function(function)(*tensors))

    return checked


@both_ways
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


@both_ways
def gradients(call):
    x = tf.Variable(tf.ones([2, 2]) * (rank + 1))

    def gradient(function):
        def compute(_):
            with tf.GradientTape() as tape:
                y = function(x)
            return tape.gradient(y, x, output_gradients=tf.ones_like(y) * (rank + 1))

        return call(compute, tf.constant(0))

    total = size * (size + 1) / 2
    owners = np.concatenate([np.full(len(part), r + 1) for r, part in enumerate(np.array_split(np.arange(2), size))])
    splits = [2 * (target == (rank + 1) % size) for target in everyone]
    for function, expected in (
        (lambda v: tfdist.all_reduce(v, "sum"), np.full((2, 2), total)),
        (lambda v: tfdist.all_reduce(v, "mean"), np.full((2, 2), total / size)),
        (lambda v: tfdist.all_gather(v, axis=1), np.full((2, 2), total)),
        (lambda v: tfdist.broadcast(v, 0), np.full((2, 2), total if rank == 0 else 0)),
        (lambda v: tfdist.reduce_scatter(v, "sum"), np.stack([owners, owners], 1)),
        (lambda v: tfdist.all_to_all(v, splits)[0], np.full((2, 2), (rank + 1) % size + 1)),
    ):
        equal(gradient(function), expected)
        equal(gradient(tf.function(function)), expected)  # the way back is a graph of its own, if the tape is outside


@both_ways
def gradients_of_gradients(call):
    """d/dx of Σg² over all ranks, where g is the gradient of Σc(x)³ over all ranks, and x is the same on all."""
    x = tf.range(1.0, 2 * size + 1)

    def second(function):
        def compute(v):
            with tf.GradientTape() as outer:
                outer.watch(v)
                with tf.GradientTape() as inner:
                    inner.watch(v)
                    loss = tf.reduce_sum(function(v) ** 3)
                squares = tf.reduce_sum(inner.gradient(loss, v) ** 2)
            return outer.gradient(squares, v)

        return call(compute, x) / (36 * x**3)

    ones = np.ones(2 * size)
    equal(second(lambda v: tfdist.all_reduce(v, "sum")), size**6 * ones)
    equal(second(lambda v: tfdist.all_reduce(v, "mean")), ones)
    equal(second(tfdist.all_gather), size**2 * ones)
    equal(second(lambda v: tfdist.reduce_scatter(v, "sum")), size**4 * ones)
    equal(second(tfdist.all_to_all), ones)
    equal(second(lambda v: tfdist.broadcast(v, 1)), size**2 * ones * (rank == 1))


def whatever_ranks_count():
    """Ranks that have traced and built different things before still find each other, in loops and conditionals."""
    if rank:
        tf.function(lambda v: tf.cond(v > 0, lambda: v, lambda: -v))(tf.constant(1.0))
        keras.Sequential([keras.layers.Dense(1)])

    @tf.function
    def step(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            mapped = tf.map_fn(lambda row: tf.cond(row[0] > 0, lambda: tfdist.all_reduce(row, "sum"), lambda: row), v)
        return tape.gradient(mapped, v)

    equal(step(tf.ones([3, 2])), np.full((3, 2), size))
    equal(step(tf.ones([3 + (rank == 1), 2])[:3]), np.full((3, 2), size))


def slices():
    """Rows are gathered as they are, each occurrence of its own, also where nobody knows the dense shape."""
    rows, indices = np.full([rank + 2, 3], rank + 1.0, np.float32), [7, *[rank] * (rank + 1)]
    every_row = np.concatenate([np.full([r + 2, 3], r + 1.0) for r in everyone])
    every_index = np.concatenate([[7, *[r] * (r + 1)] for r in everyone])
    in_graph = tf.function(lambda *given: tfdist.all_reduce(tf.IndexedSlices(*given), "sum"))
    for shape in ([], [[8, 3]]):
        given = tf.constant(rows), tf.constant(indices, tf.int64), *shape
        for total in (tfdist.all_reduce(tf.IndexedSlices(*given), "sum"), in_graph(*given)):
            equal(total.values, every_row)
            np.testing.assert_array_equal(total.indices, every_index)
            assert (total.dense_shape is None) == (not shape)
        equal(tfdist.all_reduce(tf.IndexedSlices(*given)).values, every_row / size)
    with tf.GradientTape() as tape:
        table = tf.Variable(tf.ones([8, 3]))
        loss = tf.reduce_sum(tf.gather(table, indices))
    unknown = tape.gradient(loss, table)
    equal(tfdist.all_reduce(tf.IndexedSlices(unknown.values, unknown.indices), "sum").values, np.ones_like(every_row))
    nothing = tf.IndexedSlices(tf.ones([rank, 2]), tf.zeros([rank], tf.int32))
    assert len(tfdist.all_reduce(nothing, "sum").values) == sum(everyone)
    # Summed only where it is asked for, and where that sends less.
    sums = initialization.context().among(None).slices
    for call in (sums.all_reduce, tf.function(sums.all_reduce)):
        many = tf.IndexedSlices(tf.ones([50, 3]), tf.zeros([50], tf.int32), tf.constant([4, 3]))
        (kept,) = call([many])
        assert len(kept.values) == 50 * size
        (summed,) = call([many], keep_rows=False)
        equal(summed.values, [[50 * size] * 3, *[[0] * 3] * 3])
        np.testing.assert_array_equal(summed.indices, range(4))
        few = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([rank]), tf.constant([1000, 3]))
        both = call([few, many], keep_rows=False)
        np.testing.assert_array_equal(both[0].indices, everyone)
        equal(both[1].values, summed.values)


def means_near_the_limits():
    """A mean that is within the range of its dtype does not overflow."""
    in_graph = tf.function(tfdist.all_reduce)
    floats = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64)
    for dtype in (*floats, tf.int8, tf.uint32, tf.int64, tf.uint64):
        limits = np.full([size, 2], dtype.real_dtype.max).astype(dtype.as_numpy_dtype)
        value = tf.constant(limits)
        for mean in (tfdist.all_reduce(value), in_graph(value), tfdist.reduce_scatter(value)):
            assert mean.dtype == dtype
            if dtype.is_integer:
                np.testing.assert_array_equal(mean, limits[: len(mean)])
            else:
                equal(tf.cast(mean / limits[0, 0], tf.float64), 1)
    rows = tf.constant([6e4, *[rank] * (size - 1)], tf.float16)  # only the first process's part overflows
    equal(tfdist.reduce_scatter(rows), [(size - 1) / 2 if rank else 6e4])


def weights():
    """A process's tensors count by its weight; where that is zero, whatever they hold."""
    bridge, sums = initialization.context().among(None).bridge, initialization.context().among(None).slices
    shares = np.arange(size) / (size * (size - 1) / 2)  # rank 0 has none
    weight = tf.constant(shares[rank], tf.float64)
    in_graph = tf.function(lambda tensors, weight: bridge.all_reduce(tensors, weight=weight))
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64):
        for elements in (3, 500_000):
            value = np.full([elements], 3.0 + rank)
            value[::2] = np.nan if rank == 0 else 1.0
            value[1] = np.inf if rank == 0 else 5.0
            given = [tf.cast(value, dtype), tf.cast(tf.reshape(value[:3], [3, 1]), dtype)]
            expected = np.full([elements], (shares * (3.0 + np.arange(size))).sum())
            expected[::2], expected[1] = 1.0, 5.0
            for call in (lambda t, weight: bridge.all_reduce(t, weight=weight), in_graph):
                whole, small = call(given, weight=weight)
                tolerance = {tf.float16: 1e-3, tf.bfloat16: 1e-2}.get(dtype, 1e-6)
                np.testing.assert_allclose(tf.cast(whole, tf.complex128), expected, rtol=tolerance)
                np.testing.assert_allclose(tf.cast(small[:, 0], tf.complex128), expected[:3], rtol=tolerance)
                assert whole.dtype == dtype
    rows = tf.fill([2, 3], tf.cast(np.nan if rank == 0 else 2.0, tf.float16))
    for call in (sums.all_reduce, tf.function(sums.all_reduce)):
        (reduced,) = call([tf.IndexedSlices(rows, tf.constant([1, rank]), tf.constant([9, 3]))], weight=weight)
        np.testing.assert_allclose(reduced.values, np.repeat(2 * shares[1:], 2)[:, None] * np.ones(3), rtol=1e-3)
        np.testing.assert_array_equal(reduced.indices, [place for r in everyone[1:] for place in (1, r)])
    with pytest.raises(ValueError, match="either weight or contributes"):
        sums.all_reduce([tf.IndexedSlices(tf.ones([1, 1]), [0])], weight=weight, contributes=tf.constant(True))
    with pytest.raises(ValueError, match="floating-point or complex tensors; got"):
        bridge.all_reduce([tf.constant(1)], weight=weight)


def small_integers():
    equal(tfdist.all_reduce(tf.constant([100], tf.int8)), [100])
    equal(tfdist.reduce_scatter(tf.fill([size], tf.constant(200, tf.uint8))), [200])
    unconnected = tfdist.all_reduce([tf.constant(1.0), None], "sum")
    assert unconnected[1] is None
    equal(unconnected[0], size)
    gathered = tf.function(lambda v: tf.gradients(tf.gather(tfdist.all_reduce(v, "sum"), [0, 0]), v))
    equal(gathered(tf.ones([2]))[0], [2 * size, 0])
    equal(tf.shape(tfdist.reduce_scatter(tf.zeros([size, 0]))), [1, 0])


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
            for rows in (2, 1000):  # gathered, and summed in the dense form
                slices = tf.IndexedSlices(tf.ones([rows, 3]), tf.range(rows), [1000, 3])
                equal(tf.convert_to_tensor(tfdist.all_reduce(slices, "sum"))[:2], np.full((2, 3), with_data))
            tfdist.barrier()
        assert tfdist.join() == size - 1
    equal(tfdist.all_reduce(tf.constant(1.0), "sum"), size)


def variables():
    made = [tf.Variable(tf.fill([n], float(rank))) for n in (1, 5)]
    tfdist.broadcast_variables(made, root_rank=1)
    equal(made[1], np.ones(5))


def wrong():
    for call, words in (
        (
            lambda: tfdist.all_reduce(tf.ones(1), "avg"),
            "op must be one of sum, mean, min, max, product, adasum; got 'avg'",
        ),
        (lambda: tfdist.Group([0, 0]), "each once; got [0, 0]"),
        (lambda: tfdist.Group([0, size]), f"from 0 to {size - 1}"),
        (lambda: tfdist.broadcast(tf.ones(1), size), "the rank must be one of the ranks"),
        (lambda: tfdist.all_to_all(tf.ones(size + 1)), "divisible by"),
        (lambda: tfdist.all_gather(tf.constant(1)), "at least one dimension"),
        (lambda: tfdist.all_gather(tf.ones([2, 2]), axis=5), "one of the tensor's 2 dimensions; got 5"),
        (lambda: tfdist.all_to_all(tf.constant(1)), "at least one dimension"),
        (lambda: tfdist.all_reduce(tf.constant("a")), "tensors of numbers; got string"),
        (lambda: tfdist.all_reduce(tf.constant(True)), "cast it to an integer type"),
        (lambda: tfdist.all_gather(tf.ragged.constant([[1], []])), "dense tensors; got a RaggedTensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(words)):
            call()
    unknown = tf.function(tfdist.all_gather, input_signature=[tf.TensorSpec(None)])
    with pytest.raises(ValueError, match="how many dimensions"):
        unknown.get_concrete_function()


def fit_without_a_strategy():
    class Said(logging.Handler):
        texts = ()

        def emit(self, record):
            self.texts = (*self.texts, record.getMessage())

    said = Said()
    logging.getLogger("tfdist").addHandler(said)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    logging.getLogger("tfdist").removeHandler(said)
    assert any("this fit trains on this process alone" in text for text in said.texts), said.texts


def edges():
    """Around a circle, a hundred micro-batches before the first is received; the ends are different programs."""
    right, left = (rank + 1) % size, (rank - 1) % size
    spec = tf.TensorSpec([4, 3], tf.bfloat16)
    for batch in range(100):
        tfdist.send(tf.fill([4, 3], tf.cast(batch + rank, tf.bfloat16)), right, "activations")
    received = [tfdist.receive(spec, left, "activations") for _ in range(100)]
    equal(tf.cast([value[0, 0] for value in received], tf.float32), np.arange(100) + left)

    @tf.function
    def forward(x):
        for part in tf.split(x, 5):
            tfdist.send(part, right, "in graphs")
        return tf.concat([tfdist.receive(tf.TensorSpec([None, 2]), left, "in graphs") for _ in range(5)], 0)

    for rows in (5, 10):  # along one edge, as the sender likes
        outputs = forward(tf.reshape(tf.range(2.0 * rows), [rows, 2]) + 1000 * rank)
        equal(outputs, np.arange(2.0 * rows).reshape(rows, 2) + 1000 * left)

    @tf.function
    def known():
        tfdist.send(tf.constant(rank), right, "a scalar")
        value = tfdist.receive(tf.TensorSpec([], tf.int32), left, "a scalar")
        assert value.shape == []
        return value

    assert known() == left
    large = tf.range(3e6) + rank
    tfdist.send(large, right, "large")
    equal(tfdist.receive(tf.TensorSpec([None]), left, "large")[:5], np.arange(5.0) + left)
    memory = np.empty(8_000_064, np.uint8)
    begin = -memory.ctypes.data % 64
    reused = memory[begin : begin + 8_000_000].view(np.float64)  # so aligned that TensorFlow shares its memory
    reused[:] = rank
    tfdist.send(reused, right, "an array that is used again")
    reused[:] = -1
    equal(tfdist.receive(tf.TensorSpec([None], tf.float64), left, "an array that is used again"), left)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def of_any_rank(x):
        tfdist.send(x, right, "of any rank")

    of_any_rank(tf.ones([2, 2]))
    equal(tfdist.receive(tf.TensorSpec([2, None]), left, "of any rank"), 1)
    nothing = tf.zeros([0, 7])
    tfdist.send(nothing, right, "nothing")
    assert tfdist.receive(tf.TensorSpec([None, 7]), left, "nothing").shape == (0, 7)
    pair = tfdist.Group([size - 1, 0])  # edges of a group are others than those of all
    if rank == 0:
        tfdist.send(tf.constant([7.0]), size - 1, "activations", pair)
    elif rank == size - 1:
        equal(tfdist.receive(tf.TensorSpec([1]), 0, "activations", pair), 7.0)
    with pytest.raises(ValueError, match="an edge runs between two different ranks"):
        tfdist.send(tf.ones(1), rank)
    with pytest.raises(ValueError, match="must be one of the ranks"):
        tfdist.receive(tf.TensorSpec([1]), size)
    with pytest.raises(ValueError, match="how many dimensions"):
        tfdist.receive(tf.TensorSpec(None), left)


def mismatches():
    """What differs between ranks is an error on all of them, and what they call next works; of unusual sizes."""
    equal(tfdist.all_reduce(tf.ones(3)), np.ones(3))
    pair = tfdist.Group([0, 1])

    def rows(width):
        return tf.IndexedSlices(tf.ones([2, width]), tf.constant([0, rank]))

    calls = {
        "shapes": lambda: tfdist.all_reduce(tf.ones(101 + rank)),
        "dimensions": lambda: tfdist.all_gather(tf.ones([2, 107 + rank])),
        "dtypes": lambda: tfdist.all_reduce(tf.ones(109, tf.int64 if rank else tf.float32)),
        "axes": lambda: tfdist.all_gather(tf.ones([103, 103]), axis=min(rank, 1)),
        "collectives": lambda: (tfdist.all_reduce if rank else tfdist.all_gather)(tf.ones([2, 113])),
        "rows": lambda: tfdist.all_reduce([rows(127 + rank), rows(2)], "sum"),
        "rows of one": lambda: tfdist.all_reduce([rows(131 + rank)], "sum"),
        "numbers of rows": lambda: tfdist.all_reduce([rows(137)] * (1 + (rank > 0)), "sum"),
        "of a group": lambda: rank < 2 and tfdist.all_reduce(tf.ones(121 + rank), group=pair),
    }
    for what, call in calls.items():
        if what != "of a group" or rank < 2:
            with pytest.raises(tfdist.MismatchError, match="ranks take part in different collectives: rank 0 waits in"):
                call()
        equal(tfdist.all_reduce(tf.ones(3)), np.ones(3))
        for elements in (101, 102, 109, 121, 122):  # keys that were used by some ranks alone
            equal(tfdist.all_reduce(tf.fill(elements, 1.0 + rank), "sum"), np.full(elements, sum(everyone) + size))
    equal(tfdist.all_reduce([rows(131)], "sum")[0].indices, [index for other in everyone for index in (0, other)])
    tfdist.barrier()
    if rank < 2:
        equal(tfdist.all_reduce(tf.ones(121) * rank, "sum", group=pair), np.ones(121))


def mismatches_in_graphs():
    """So it is in graphs, in which calls that wait have one order; functions have names that no other graph has."""

    @tf.function
    def one_or_other():
        return (tfdist.all_reduce if rank else tfdist.all_gather)(tf.ones([2, 151]))

    @tf.function
    def in_turn():
        calls = [lambda: tfdist.all_reduce(tf.ones(139)), lambda: tfdist.all_gather(tf.ones([2, 139]))]
        return [call() for call in (calls if rank else reversed(calls))]

    @tf.function
    def in_graph():
        return tfdist.all_reduce(tf.ones(149))

    words = "ranks take part in different collectives: rank 0 waits in"
    for call in (one_or_other, in_turn, in_graph if rank else lambda: tfdist.all_reduce(tf.ones(149))):
        with pytest.raises((tfdist.MismatchError, tf.errors.UnknownError), match=words):
            call()
        equal(tfdist.all_reduce(tf.ones(3)), np.ones(3))
    equal(in_graph(), np.ones(149))


class Centred(keras.layers.Layer):
    """Subtracts the mean over all samples, for which only some ranks ask the others."""

    asks = bool(rank)

    def call(self, inputs):
        mean = tf.reduce_mean(inputs)
        return inputs - (tfdist.all_reduce(mean) if self.asks else mean)


def a_model_that_communicates_on_some_ranks():
    """`fit` raises the error of the graph, and trains once the models are alike."""
    with tfdist.AllReduceStrategy().scope():
        keras.utils.set_random_seed(1)
        centred = Centred()
        model = keras.Sequential([keras.layers.Dense(4), centred, keras.layers.BatchNormalization()])
        model.compile("sgd", "mse")
    x = np.random.default_rng(1).normal(size=(8 * size, 3))
    words = rf"rank 0 waits in .*#0: (shared )?sum of .*; rank 1 waits in .*#0: mean of .*; rank {size - 1} waits in"
    with pytest.raises(tfdist.MismatchError, match=words if size > 2 else words.rpartition(";")[0]):
        model.fit(x, x[:, :1], batch_size=4 * size, verbose=0)
    centred.asks = True
    model.make_train_function(force=True)
    losses = [model.fit(x, x[:, :1], batch_size=4 * size, verbose=0).history["loss"][0] for _ in range(2)]
    assert losses[1] < losses[0]
    for weight in model.get_weights():
        equal(tfdist.broadcast(weight), weight)


@tf.function
def in_branches(first):
    one, other = lambda: tfdist.all_reduce(tf.ones(2)), lambda: tfdist.all_gather(tf.ones([1, 2]))[0]
    return tf.cond(first, lambda: one() + other(), lambda: other() + one())


def different():
    calls = {
        "op": [lambda: tfdist.all_reduce(tf.ones(2), "sum"), lambda: tfdist.all_reduce(tf.ones(2), "mean")],
        "root": [lambda: tfdist.broadcast(tf.ones(2), 0), lambda: tfdist.broadcast(tf.ones(2), 1)],
        "branch": [lambda: in_branches(tf.constant(True)), lambda: in_branches(tf.constant(False))],
    }[os.environ["TEST_DIFFERENT"]]
    if os.environ["TEST_DIFFERENT"] != "root":
        for call in calls:  # on all ranks alike: both are known
            call()
    calls[rank]()


if os.environ.get("TEST_DIFFERENT"):
    different()
run_checks(globals())
