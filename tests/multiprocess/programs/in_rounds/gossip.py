"""`GossipStrategy` against NumPy, and with what Keras has; a check for each name in TEST_CASES, all by default."""

import itertools
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from common import (
    Stops,
    StopsBefore,
    batched,
    callbacks_set_rates_and_weights,
    dealt,
    in_sweeps,
    sums_are_those_of_the_whole_batch,
)
from comparing import assert_alike, assert_close
from gossip_reference import Training, exponential, ring
from interrupting import Interrupts
from own_steps import Gan, stepping
from replay import Recorder, replayed

import tfdist
from tfdist.compression import Int8, TopK, by_size
from tfdist.parameter_server import Asynchronous, BoundedStaleness

FOLDER = sys.argv[1]
ROWS, BATCH, EPOCHS = 60, 12, 3  # equal shares on 1, 2 and 3 processes
RATE = 1 / 16  # exact in float32, in which Keras has rates

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
generator = np.random.default_rng(0)
X = generator.normal(size=(ROWS, 5))
Y = X @ generator.normal(size=(5, 3)) + 0.1 * generator.normal(size=(ROWS, 3))
START = [generator.normal(size=(5, 3)), generator.normal(size=3)]


def shares():
    """For each step, each process's rows."""
    batches = [np.arange(begin, begin + BATCH) for begin in range(0, ROWS, BATCH)]
    return [[(X[part], Y[part]) for part in np.array_split(batch, size)] for batch in batches]


def linear(strategy, **compiling):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(RATE), "mse", **compiling)
    model.set_weights(START)
    return model


def fit(model, epochs=EPOCHS, **how):
    return model.fit(batched(X, Y, BATCH), epochs=epochs, verbose=0, **how).history


def line(size, number=0):
    """A path through all processes, weighted by Metropolis and Hastings."""
    matrix = np.zeros([size, size])
    degrees = [1 if node in (0, size - 1) else 2 for node in range(size)]
    for node in range(size - 1):
        matrix[node, node + 1] = matrix[node + 1, node] = 1 / (1 + max(degrees[node], degrees[node + 1]))
    return matrix + np.diag(1 - matrix.sum(axis=1))


def golden():
    """Trajectories of a few steps, after each epoch: D-PSGD in both forms, and CHOCO-SGD."""
    path = {node: [other for other in (node - 1, node + 1) if 0 <= other < size] for node in range(size)}
    coarse = {"compression": by_size({0: None, 10: TopK(0.2)})}
    cases = (  # on two processes, and on more
        ({}, {}),
        ({"topology": path}, {"matrix": line}),
        ({"overlap": True}, {"overlaps": True}),
        ({"topology": path, "overlap": True, "sync_every": 2}, {"matrix": line, "overlaps": True, "every": 2}),
        ({"topology": "exponential"}, {"matrix": exponential}),
        ({"synchronization": BoundedStaleness(0), "topology": path}, {"matrix": line}),
        ({"topology": ring(size), "sync_every": 2}, {"every": 2}),
        ({**coarse, "consensus_rate": 0.5, "topology": path}, {"matrix": line, "kept": 3, "consensus": 0.5}),
    )
    for place, (arguments, expected) in enumerate(dealt(cases, size, 5)):
        reference = Training(START, size, **expected)
        strategy = tfdist.GossipStrategy(**arguments)
        model = linear(strategy)
        for epoch in range(EPOCHS):
            fit(model, epochs=epoch + 1, initial_epoch=epoch)
            reference.epoch(shares())
            assert_close(model, reference.weights[0])
            np.testing.assert_allclose(strategy.distance(model), reference.distance(), rtol=1e-6, atol=1e-12)
        assert_alike(model)
        if size == 3:
            way = {"run_eagerly": True} if place % 2 else {"steps_per_execution": 3}
            other = linear(tfdist.GossipStrategy(**arguments), **way)
            fit(other)
            assert_close(other, reference.weights[0])


def recorded():
    """AD-PSGD and bounded staleness: what happened when is recorded, and NumPy comes to the same by it."""
    for synchronization in (Asynchronous(), BoundedStaleness(3)):
        strategy = tfdist.GossipStrategy(topology="complete", synchronization=synchronization)
        model = linear(strategy)
        expected = START
        for epoch in range(4):
            with Recorder() as recorder:
                fit(model, epochs=epoch + 1, initial_epoch=epoch)
            events = tfdist.all_gather(tf.constant([recorder.events], tf.int64, [1, *np.shape(recorder.events)]))
            expected = replayed(expected, events.numpy().tolist(), shares(), RATE, 1 / size)
            assert_close(model, expected)
        assert len(recorder.events) > 5, recorder.events
        assert_alike(model)


def synchronous():
    """Where all average with all, plain SGD is what one process does, and so are `evaluate` and `predict`."""

    def trained(strategy, run_eagerly=False):
        model = linear(strategy, metrics=["mae"], run_eagerly=run_eagerly)
        return model, fit(model, validation_data=batched(X[:24], Y[:24], 32))

    plain, expected = trained(tf.distribute.get_strategy(), run_eagerly=True)
    model, history = trained(tfdist.GossipStrategy(topology="complete"))
    assert_close(model, plain.get_weights())
    for name in ("val_loss", "val_mae"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-9)
    sums_are_those_of_the_whole_batch(linear, tfdist.GossipStrategy(topology="complete"), 1)
    if not os.environ.get("TEST_SWEEP"):  # local SGD has the rest, too, by the same code
        return
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-8)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-9)
    callbacks_set_rates_and_weights(linear, tfdist.GossipStrategy(topology="complete"))


WAYS = (
    {},
    {"topology": "exponential", "overlap": True},
    {"topology": "random", "sync_every": 2},
    {"synchronization": BoundedStaleness(2)},
    {"synchronization": Asynchronous()},
    {"compression": TopK(0.1)},
)


def deep(strategy, optimizer, dtype=None, **compiling):
    """With moving statistics and random numbers."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        built = keras.Sequential(
            [
                keras.layers.Input((5,)),
                keras.layers.Dense(40, "tanh", dtype=dtype),
                keras.layers.BatchNormalization(dtype=dtype),
                keras.layers.Dropout(0.2, dtype=dtype),
                keras.layers.Dense(30, dtype=dtype),
                keras.layers.Dense(3, dtype="float32" if dtype else None),
            ]
        )
        built.compile(optimizer(), "mse", metrics=["mae"], **compiling)
    return built


def features():
    """What Keras has goes together with gossip: all processes end with equal weights and logs, and have learned."""
    optimizers = (
        keras.optimizers.Adam,
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=1.0),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5, global_clipnorm=1.0),
        lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=4),
        lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 50), clipvalue=0.5),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**20),
    )
    for optimizer, arguments in dealt(zip(optimizers, itertools.cycle(WAYS), strict=False), 1, 3):
        scaled = isinstance(optimizer(), keras.optimizers.LossScaleOptimizer)
        strategy = tfdist.GossipStrategy(**arguments)
        model = deep(strategy, optimizer, "mixed_float16" if scaled else None)
        reports, stale = tfdist.callbacks.Communication(), tfdist.callbacks.StalenessReport()
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
        whole = batched(X, Y, 32)
        before = model.evaluate(whole, verbose=0)[0]
        history = fit(
            model, epochs=6, validation_data=batched(X[:21], Y[:21], 32), callbacks=[stopping, reports, stale]
        )
        assert_alike(model)
        assert len(history["loss"]) == 2, history
        everyone = tfdist.all_gather(tf.constant([[history[name][-1] for name in sorted(history)]])).numpy()
        assert (everyone == everyone[0]).all(), (sorted(history), everyone)
        assert model.evaluate(whole, verbose=0)[0] < before
        assert len(model.predict(whole, verbose=0)) == ROWS
        assert len(reports.history["replica_distance"]) == 2, reports.history
        assert 0 <= reports.history["replica_distance"][-1] < 1, reports.history
        if size > 1:
            late = stale.history
            assert len(late["staleness"]) == 2, late
            assert late["staleness"][-1] <= late["most_staleness"][-1], late
            if "synchronization" not in arguments:
                assert late["most_staleness"][-1] == float("overlap" in arguments), late


def stopped():
    """One process ends the steps of all, from neighbour to neighbour, in an epoch that has no end."""

    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True).repeat()
    for arguments in (WAYS[1], WAYS[4], *in_sweeps(WAYS[0], WAYS[2], WAYS[3])):
        model, stops = linear(tfdist.GossipStrategy(**arguments)), Stops(4 if rank == size - 1 else None)
        history = model.fit(endless, epochs=3, verbose=0, callbacks=[stops]).history
        assert len(history["loss"]) == 1
        if rank == size - 1:
            assert stops.seen == 4 + arguments.get("sync_every", 1), (arguments, stops.seen)
        assert_alike(model)
        fit(model, epochs=1)  # nobody wishes anything any more
        assert_alike(model)
        before = int(model.optimizer.iterations)
        history = model.fit(endless, epochs=3, verbose=0, callbacks=[StopsBefore()] if rank == size - 1 else []).history
        assert len(history["loss"]) == 1
        assert int(model.optimizer.iterations) == before + 1, arguments
        assert_alike(model)


def loops():
    """Steps that a user wrote: of two optimizers in `fit`, and without `fit`."""
    for arguments in dealt(WAYS, 1, 2):
        strategy = tfdist.GossipStrategy(**arguments)
        with strategy.scope():
            gan = Gan()
            gan.build((None, 5))
            gan.compile(keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.01, momentum=0.9))
        gan.fit(tf.data.Dataset.from_tensor_slices(X).batch(BATCH), epochs=2, verbose=0)
        assert_alike(gan)

    reference = Training(START, size)
    model = linear(strategy := tfdist.GossipStrategy())

    step = stepping(strategy, model)

    for batch in shares():
        step(*map(tf.constant, batch[rank]))
    reference.epoch(shares())
    strategy.settle(model)
    assert_close(model, reference.weights[0])


def again():
    """A model that is compiled again, trained after an interrupt, and with weights that were set between and within."""
    for arguments in dealt(WAYS, 0, 2):
        strategy = tfdist.GossipStrategy(**arguments)
        model = linear(strategy)
        fit(model, epochs=1)
        with strategy.scope():
            model.compile(keras.optimizers.Adam(0.01), "mse")
        fit(model, epochs=1)
        assert_alike(model)

        with pytest.raises(KeyError, match="interrupted"):
            fit(model, callbacks=[Interrupts(batch=3)])
        fit(model, epochs=1)
        assert_alike(model)

        class Resets(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 4:  # the last one
                    self.model.set_weights(START)

        fit(model, epochs=1, callbacks=[Resets()])
        assert_close(model, START)
        model.set_weights([weight + 1 for weight in START])
        model.evaluate(batched(X, Y, 32), verbose=0)
        assert_close(model, [weight + 1 for weight in START])


def uneven():
    """A process that has fewer batches is left out by its neighbours until the end; one without any is not counted."""
    for arguments in dealt(WAYS, 4, 6):
        strategy = tfdist.GossipStrategy(**arguments)
        model = linear(strategy)

        def dataset(context):
            rows = 4 * (1 + 6 * context.input_pipeline_id)
            return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(4)

        model.fit(strategy.distribute_datasets_from_function(dataset), epochs=2, verbose=0)
        assert_alike(model)
        assert np.isfinite(model.evaluate(batched(X, Y, 32), verbose=0))

    strategy = tfdist.GossipStrategy()
    model = linear(strategy)

    def of_the_first(context):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        return data.take(0 if context.input_pipeline_id else 100)

    model.fit(strategy.distribute_datasets_from_function(of_the_first), epochs=2, verbose=0)
    reference = Training(START, 1)
    for _ in range(2):
        reference.epoch([[(X[begin : begin + BATCH], Y[begin : begin + BATCH])] for begin in range(0, ROWS, BATCH)])
    assert_close(model, reference.weights[0])


def compressed():
    """Fewer bytes, and it still learns."""
    for compression in (TopK(0.05), *in_sweeps(Int8())):
        strategy = tfdist.GossipStrategy(compression=compression)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(800, "tanh"), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.02), "mse")
        model.build((None, 5))
        fit(model, epochs=1)
        before = strategy.communication()["bytes"]
        losses = fit(model, epochs=6)["loss"]
        sent = strategy.communication()["bytes"] - before
        assert losses[-1] < losses[0] / 2, losses
        assert_alike(model)
        neighbours, steps = min(2, size - 1), 6 * ROWS // BATCH  # each gets all weights in each step
        plain = neighbours * steps * sum(weight.numpy().nbytes for weight in model.weights)
        assert size == 1 or sent < 0.7 * plain, (sent, plain)


def restarted():
    """`BackupAndRestore` goes on with the epoch that was under way, `ModelCheckpoint` writes what all have."""
    place = os.path.join(FOLDER, f"backup-{size}")
    path = os.path.join(FOLDER, f"model-{size}.keras")

    expected = linear(tfdist.GossipStrategy())
    fit(expected, epochs=4)
    with pytest.raises(KeyError, match="interrupted"):
        fit(
            linear(tfdist.GossipStrategy()),
            epochs=4,
            callbacks=[keras.callbacks.BackupAndRestore(place), keras.callbacks.ModelCheckpoint(path), Interrupts(2)],
        )
    tfdist.barrier()
    model = linear(tfdist.GossipStrategy())
    fit(model, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(place)])
    assert_close(model, expected.get_weights())
    assert_alike(model)
    half = linear(tfdist.GossipStrategy())
    fit(half, epochs=2)
    assert_close(keras.models.load_model(path), half.get_weights())


def waits_for_nobody():
    """A process that stands still does not keep the others from their steps, and all then end together."""
    there = Path(FOLDER) / f"taken-{size}"

    class Stands(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 0 and batch == 1:
                while not there.exists():  # the deadline is the test's
                    pass
            if rank == size - 1 and batch == 30:
                there.touch()

    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(8).batch(BATCH)
    for synchronization in (Asynchronous(), BoundedStaleness(40)):
        there.unlink(missing_ok=True)
        tfdist.barrier()
        strategy = tfdist.GossipStrategy(synchronization=synchronization)
        model = linear(strategy)
        dataset = strategy.distribute_datasets_from_function(lambda context: data)
        model.fit(dataset, epochs=1, verbose=0, callbacks=[Stands()])
        assert_alike(model)


def mismatched():
    """Processes with different topologies."""
    tfdist.GossipStrategy(topology=["ring", "random"][rank])


def unfit():
    """A graph of another number of processes."""
    tfdist.GossipStrategy(topology=[[0, 1], [1, 0]])


def endless():
    """Until a process is killed."""

    class Saying(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                print("READY", flush=True)

    strategy = tfdist.GossipStrategy(synchronization=Asynchronous() if os.environ.get("TEST_ASYNCHRONOUS") else None)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    linear(strategy).fit(data, steps_per_epoch=1_000_000, verbose=0, callbacks=[Saying()])


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
