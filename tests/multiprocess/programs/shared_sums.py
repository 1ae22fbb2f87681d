"""Sums in memory that processes share: to the bit, with weights, of many lengths, and what becomes of calls in vain."""

import time

import keras
import numpy as np
import tensorflow as tf
from checking import run_checks
from told import Told

import tfdist
from tfdist.collectives.schedule import partition
from tfdist.engine import bridge as bridge_module
from tfdist.engine import shared_sums
from tfdist.engine.timeline import EventRecorder
from tfdist.private.keras import tf_nn

strategy = tfdist.AllReduceStrategy()
group = strategy.extended.group
rank, size = strategy.rank, strategy.size
bridge = strategy.extended.bridge


def in_a_graph(function, **settings):
    """A function whose tensors are summed; fails if they are not summed in shared memory."""

    def summed(*given):
        tensors, *weight = function(*given)
        return bridge.all_reduce(tensors, weight=weight[0] if weight else None, in_memory=True)

    graph = tf.function(summed, autograph=False, **settings)

    def call(*given):
        before = group.engine.beside.totals().collectives
        totals = graph(*given)
        assert group.engine.beside.totals().collectives > before
        return [total.numpy() for total in totals]

    return call


def by_a_ring(vectors, dtype):
    """What a ring makes of one vector for each rank: each chunk is added up from the rank of its number on."""
    total = np.empty(vectors[0].size, dtype)
    for chunk, part in enumerate(partition(total.size, size)):
        summed = vectors[chunk][part]
        for turn in range(1, size):
            summed = summed + vectors[(chunk + turn) % size][part]
        total[part] = summed
    return total


BLOCK = 1 << 16
"""Elements of a block, of which a process exchanges one after the other."""

OF_BLOCKS = [2 * BLOCK * size], [BLOCK * size + 1], [1, 4 * BLOCK * size, 5]


def bits():
    """Vectors of all lengths cut into tensors, with weights, by which NaN and infinity may become zero."""
    for dtype in (np.float32, np.float64):
        for lengths in ([1], [2, 0, 3], [7], [300, 1, 4097], [100_003], [5] * 40, *OF_BLOCKS):
            rows = [np.random.default_rng(number).standard_normal(sum(lengths)) for number in range(size)]
            rows = [(row * 10.0 ** np.random.default_rng(9).integers(-3, 3, row.size)).astype(dtype) for row in rows]
            for weights in ([1.0] * size, np.linspace(0.1, 0.7, size), [0.0, *[1.0] * (size - 1)]):
                rows[0][:1] = np.nan if weights[0] == 0 else 1
                cuts = np.cumsum(lengths)[:-1]
                call = in_a_graph(lambda *parts: (parts[:-1], parts[-1]))
                for _ in range(2):
                    totals = call(*map(tf.constant, np.split(rows[rank], cuts)), tf.constant(weights[rank], tf.float64))
                terms = [row * dtype(w) if w else np.zeros_like(row) for row, w in zip(rows, weights, strict=True)]
                assert np.concatenate(totals).tobytes() == by_a_ring(terms, dtype).tobytes(), (dtype, lengths, weights)


def blocks():
    """Many sums of many blocks, for which processes come early and late: none reads what is of another block or sum."""
    elements = 7 * BLOCK * size + 11
    places, call = np.arange(elements, dtype=np.float32) % 1009, in_a_graph(lambda given: ([given],))
    work = np.random.default_rng(rank)
    for turn in range(40):
        (total,) = call(tf.constant(places * (rank + 1) + turn))
        np.testing.assert_array_equal(total, places * (size * (size + 1) / 2) + size * turn)
        np.sort(work.standard_normal(work.integers(1, 100_000)))


def edges():
    """Numbers at the edges of what a dtype can represent, which threads of TensorFlow flush."""
    smallest, largest = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    (total,) = in_a_graph(lambda given: ([given],))(tf.constant([smallest, largest, -0.0, np.inf * (1 - 2 * rank)]))
    with np.errstate(over="ignore"):
        expected = [np.float32(size) * smallest, np.inf, 0.0]
    np.testing.assert_array_equal(total[:3], expected)
    assert np.signbit(total[2])
    assert np.isnan(total[3])


def inputs():
    """What is summed stays as it is: variables, constants, and values that others read; shapes, too."""
    variable = tf.Variable(tf.fill([3, 5], rank + 1.0))

    def step():
        doubled = variable * 2
        given = [variable.read_value(), tf.constant(3.0), doubled, tf.zeros([0, 4])]
        return *bridge.all_reduce(given, in_memory=True), doubled

    step, ranks = tf.function(step, autograph=False), size * (size + 1) / 2
    for _ in range(3):
        one, three, doubled, nothing, again = step()
        np.testing.assert_array_equal(one, np.full([3, 5], ranks))
        assert three == 3 * size
        np.testing.assert_array_equal(doubled, np.full([3, 5], 2 * ranks))
        assert nothing.shape == (0, 4)
        np.testing.assert_array_equal(again, np.full([3, 5], 2 * (rank + 1)))
        np.testing.assert_array_equal(variable, np.full([3, 5], rank + 1))


def models():
    """Models with the same call sites, in turn: each has memory again when it is its turn, and others' is released."""
    calls = [in_a_graph(lambda given: ([given],)) for _ in range(9)]
    for turn in range(3):
        for number, call in enumerate(calls):
            (total,) = call(tf.fill([1000 * number + 10], rank + turn + 1.0))
            np.testing.assert_array_equal(total, np.full(1000 * number + 10, size * (size + 1) / 2 + size * turn))
    site = group.engine.beside.sites[None, "summed: shared sum of 1 float32 #0"]
    assert sum(bool(channel._areas) for channel in site._channels.values()) == shared_sums._MOST_OPEN


def several():
    """Sums of both dtypes and of one that is not summed in memory, in loops and conditionals."""

    @tf.function
    def step(turns):
        total, wide, whole = tf.zeros([5]), tf.zeros([], tf.float64), tf.constant(0)
        for turn in tf.range(turns):
            if turn % 2 == 0:
                parts = [tf.ones([5]), tf.constant(2.0, tf.float64), turn]
                parts = bridge.all_reduce(parts, in_memory=True)
                total, wide, whole = total + parts[0], wide + parts[1], whole + parts[2]
        return total, wide, whole

    total, wide, whole = step(5)
    assert (total.numpy() == 3 * size).all()
    assert (wide.numpy(), whole.numpy()) == (6 * size, 6 * size)


def buckets():
    """More bytes than are summed at once."""
    before, bridge_module.BUCKET_BYTES = bridge_module.BUCKET_BYTES, 4000
    parts = [tf.fill([300 + place], place + rank + 1.0) for place in range(9)]
    parts += [tf.fill([1000], tf.constant(7.0, tf.float64)), tf.zeros([0, 4])]
    call = in_a_graph(lambda: (parts,))
    call()
    bridge_module.BUCKET_BYTES = before
    before = group.engine.beside.totals().collectives
    sums = call()
    assert group.engine.beside.totals().collectives == before + 4, "4 + 4 + 2 of one dtype, and 1 of the other"
    for place, total in enumerate(sums[:9]):
        np.testing.assert_array_equal(total, np.full(300 + place, size * place + size * (size + 1) / 2))
    np.testing.assert_array_equal(sums[9], np.full(1000, 7.0 * size))
    assert sums[10].shape == (0, 4)


def within_steps():
    """All that a step sums is summed in memory: counts of batches, moments both ways, a divisor, metrics, gradients."""
    rows = np.random.default_rng(0).normal(size=(24 * size, 5)).astype(np.float32)
    with strategy.scope():
        inputs = keras.Input((5,))
        normal = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Masking()(normal[:, None])))
        model.compile("sgd", "mse", metrics=["mae"])

    def calls_in(steps, **read):
        data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(4 * size).take(steps)
        reads = keras.callbacks.LambdaCallback(**read)
        before = group.engine.statistics.begun, group.engine.beside.totals().collectives
        model.fit(data, callbacks=[reads], shuffle=False, verbose=0)
        after = group.engine.statistics.begun, group.engine.beside.totals().collectives
        return np.subtract(after, before)

    reads_tests, reads_steps = (
        {name: lambda *given, **more: None} for name in ("on_test_batch_end", "on_train_batch_end")
    )
    for read, sums in (reads_tests, 5), (reads_steps, 6):
        calls_in(6, **read)
        np.testing.assert_array_equal(calls_in(6, **read) - calls_in(2, **read), [0, 4 * sums])


def counts():
    """Ranks that do not know the number of batches take the same steps, until none has a batch or one asks to end."""
    rows = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)

    def batches(number):
        signature = tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])
        pairs = [(rows[:size], rows[:size, :1])] * number
        return tf.data.Dataset.from_generator(lambda: pairs, output_signature=signature)

    def asks(batch, logs):
        model.stop_training = rank == size - 1 and batch >= 3

    asking = keras.callbacks.LambdaCallback(on_train_batch_end=asks)
    # As in plain Keras, the step that finds no data counts, but not among several in a call, where two find none.
    for at_once, iterations, none, ends in (1, 8, 1, 4), (3, 7, 2, 6):
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            model.compile("adam", "mse", steps_per_execution=at_once)
        taken = []
        for data, callbacks in (
            (batches(7), []),
            (strategy.distribute_datasets_from_function(lambda context: batches(7 - context.input_pipeline_id)), []),
            (batches(20), [asking]),
            (batches(7), []),
        ):
            before = int(model.optimizer.iterations), group.engine.beside.totals().collectives
            for _ in range(3):
                model.fit(data, callbacks=callbacks, verbose=0)
            after = int(model.optimizer.iterations), group.engine.beside.totals().collectives
            taken.append(np.subtract(after, before).tolist())
        of_data = [3 * iterations, 3 * (2 * 7 + none)]
        with_logs = [3 * iterations, 3 * (3 * 7 + none)]
        assert taken == [of_data, with_logs, [3 * ends, 3 * (3 * ends + 1)], of_data], taken


def moments():
    """Moments and their gradients are those of all rows; the engine sums those of an unknown number of channels."""
    rows = np.random.default_rng(0).normal(2, 3, size=(3 * size, 4, 2)).astype(np.float32)
    mine = tf.constant(rows[3 * rank : 3 * rank + 3])

    def of(given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            mean, variance = tf_nn._compute_moments_sync(given, [0, 1], False)
            loss = tf.reduce_sum(mean * [1.0, 2.0]) + tf.reduce_sum(variance * [3.0, 4.0])
        return mean, variance, tape.gradient(loss, given)

    # The sum over ranks of equal losses, in which each row counts on all of them.
    gradient = ([1.0, 2.0] + 2 * np.array([3.0, 4.0]) * (rows[3 * rank :][:3] - rows.mean((0, 1)))) / (12 * size) * size
    for shape, in_memory in (([3, 4, 2], 2), ([None, None, 2], 2), ([None, None, None], 0)):
        call = tf.function(lambda given: strategy.run(of, [given]), input_signature=[tf.TensorSpec(shape)])
        call(mine)
        before = group.engine.beside.totals().collectives
        results = call(mine)
        assert group.engine.beside.totals().collectives == before + in_memory, shape
        for result, expected in zip(results, (rows.mean((0, 1)), rows.var((0, 1)), gradient), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


def traffic():
    before, call = strategy.communication(), in_a_graph(lambda given: ([given],))
    call(tf.zeros([60 * size]))
    opened = strategy.communication()
    call(tf.zeros([60 * size]))
    after = strategy.communication()
    moved = {name: after[name] - opened[name] for name in after}
    assert moved == {"collectives": 1, "messages": 2 * (size - 1), "bytes": 2 * (size - 1) * 60 * 4}, moved
    assert opened["collectives"] == before["collectives"] + 2, (before, opened)  # with what opens the call site


def recorded():
    """A timeline has the sums while it is recorded, also of graphs that were traced before."""
    call, engine = in_a_graph(lambda given: ([given],)), group.engine
    call(tf.zeros([10]))
    engine.timeline = EventRecorder(rank)
    call(tf.zeros([10]))
    recorder, engine.timeline = engine.timeline, None
    call(tf.zeros([10]))
    (flight,), (wait,) = recorder.flights, recorder.waits
    assert (flight.key, flight.contents) == ("summed: shared sum of 1 float32 #0", "1 of 1")
    assert flight.call == engine.numbers.calls((None, flight.key)) - 2
    assert list(flight.marks) == sorted(flight.marks)
    assert (wait.key, wait.begin, wait.end) == (flight.key, flight.marks[0], flight.marks[-1])
    assert 0 <= time.monotonic() - wait.end < 600


def different_shapes():
    """The same number of elements, at a call site that all know."""
    in_a_graph(lambda given: ([given],))(tf.zeros([3]))
    in_a_graph(lambda given: ([given],))(tf.zeros([2 + rank, 3 - rank]))


def different_at_first():
    in_a_graph(lambda given: ([given],))(tf.zeros([2 + rank, 3 - rank]))


def forever():
    call = in_a_graph(lambda given: ([given],))
    call(tf.ones([1000]))
    print("READY", flush=True)
    while True:
        call(tf.ones([1000]))


def late():
    """Rank 1 takes part when it is told that it is missing."""
    told = Told()
    call = in_a_graph(lambda given: ([given],))
    call(tf.ones([10]))
    if rank == 1:
        told.wait_for("(call 3: 1 of 1); missing: rank 1.", size - 1)
    call(tf.ones([10]))


def ended():
    call = in_a_graph(lambda given: ([given],))
    call(tf.ones([10]))
    if rank != size - 1:
        call(tf.ones([10]))


try:
    run_checks(globals())
except tf.errors.OpError as error:
    print("ERROR", error.message, flush=True)
    raise
