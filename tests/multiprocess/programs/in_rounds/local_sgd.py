"""`LocalSGDStrategy` against NumPy, and with what Keras has; a check for each name in TEST_CASES, all by default."""

import contextlib
import itertools
import os
import sys

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
from interrupting import Interrupts
from local_sgd_reference import Momentum, Training
from own_steps import Gan, stepping

import tfdist
from tfdist.local_sgd import Averaging, Elastic, Growing, Outer, QuadraticRule, Streaming

FOLDER = sys.argv[1]
ROWS, BATCH, EPOCHS = 64, 10, 3  # a last batch of 4 rows, of which some processes have fewer, or none
RATE = 1 / 16  # this and 0.875 are exact in float32, in which Keras has rates

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
generator = np.random.default_rng(0)
X = generator.normal(size=(ROWS, 5))
Y = X @ generator.normal(size=(5, 3)) + 0.1 * generator.normal(size=(ROWS, 3))
START = [generator.normal(size=(5, 3)), generator.normal(size=3)]


def shares(rows):
    """For each step, each process's rows: contiguous, the first ones one longer."""
    batches = [range(begin, min(begin + BATCH, rows)) for begin in range(0, rows, BATCH)]
    return [[(X[part], Y[part]) for part in np.array_split(np.array(batch), size)] for batch in batches]


def linear(strategy=None, momentum=0.0, **compiling):
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(RATE, momentum=momentum), "mse", **compiling)
    model.set_weights(START)
    return model


def fit(model, rows=ROWS, epochs=EPOCHS, **how):
    return model.fit(batched(X[:rows], Y[:rows], BATCH), epochs=epochs, verbose=0, **how).history


def golden():
    """Trajectories of a few steps, after each epoch."""
    nesterov = {"momentum": 0.875, "nesterov": True}
    cases = (
        ({"sync_every": 1}, {}),
        ({"sync_every": 3}, {"momentum": 0.875}),
        ({"sync_every": 5, "slots": "average"}, {"momentum": 0.875}),
        ({"sync_every": 100}, {}),
        ({"sync_every": 3, "start_after": 9}, {"momentum": 0.875}),
        (
            {"sync_every": 3, "rule": Outer(keras.optimizers.SGD(0.75, **nesterov))},
            {"outer": {"rate": 0.75, **nesterov}},
        ),
        ({"sync_every": 2, "rule": Elastic(0.9)}, {"elastic": 0.9}),
        ({"sync_every": 4, "streaming": Streaming(2)}, {"fragments": 2}),
        (
            {
                "sync_every": 6,
                "streaming": Streaming(2, delay=2),
                "rule": Outer(keras.optimizers.SGD(0.75, **nesterov)),
            },
            {"fragments": 2, "delay": 2, "outer": {"rate": 0.75, **nesterov}, "mix": 0.5},
        ),
        ({"sync_every": 3, "streaming": Streaming(delay=1), "rule": Averaging(mix=0.25)}, {"delay": 1, "mix": 0.25}),
        ({"sync_every": Growing(first=2, every=5, at_most=4)}, {"interval": lambda step: 2 if step < 5 else 4}),
        ({"sync_every": QuadraticRule(RATE * 2, at_least=1)}, {"interval": lambda step: 4}),
    )
    for arguments, more in dealt(cases, size, 5):
        count = arguments.get("sync_every")
        how = {"interval": lambda step, count=count: count, "averages_slots": arguments.get("slots") == "average"}
        how.update({name: arguments[name] for name in ("start_after",) if name in arguments})
        how.update(more)
        if "outer" in how:
            how["outer"] = [Momentum(**more["outer"]) for _ in range(how.get("fragments", 1))]
        expected = Training(START, size, **how)
        model = linear(tfdist.LocalSGDStrategy(**arguments), more.get("momentum", 0.0))
        for epoch in range(EPOCHS):
            fit(model, epochs=epoch + 1, initial_epoch=epoch)
            expected.epoch(shares(ROWS))
            assert_close(model, expected.centre)
        assert_alike(model)
        if size > 1 and len(arguments) > 2:  # those with most to go wrong
            for way in ({"run_eagerly": True}, {"steps_per_execution": 3}):
                other = linear(tfdist.LocalSGDStrategy(**arguments), more.get("momentum", 0.0), **way)
                fit(other)
                assert_close(other, expected.centre)


def synchronous():
    """A round of one step with SGD, with or without a start of such steps, is what one process does."""
    for arguments, momentum in (({"sync_every": 1}, 0.0), ({"sync_every": 9, "start_after": 1000}, 0.875)):
        reports = {} if momentum else {"validation_data": batched(X[:21], Y[:21], 32)}
        metrics = [] if momentum else ["mae"]
        plain = linear(None, momentum, metrics=metrics, run_eagerly=True)
        expected = fit(plain, rows=51, epochs=2, **reports)  # some processes have no row of the last batch
        model = linear(tfdist.LocalSGDStrategy(**arguments), momentum, metrics=metrics)
        history = fit(model, rows=51, epochs=2, **reports)
        assert_close(model, plain.get_weights())
        assert_alike(model)
        if not reports:
            continue
        for name in ("val_loss", "val_mae"):
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-9)
        np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-8)
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-9)
    sums_are_those_of_the_whole_batch(linear, tfdist.LocalSGDStrategy(sync_every=1), 0)
    callbacks_set_rates_and_weights(linear, tfdist.LocalSGDStrategy(sync_every=1))


def deep(strategy, optimizer, dtype=None, model=keras.Sequential, **compiling):
    """With moving statistics, random numbers and embeddings."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        built = model(
            [
                keras.layers.Input((5,)),
                keras.layers.Dense(40, "tanh", dtype=dtype),
                keras.layers.BatchNormalization(dtype=dtype),
                keras.layers.Dropout(0.2, dtype=dtype),
                keras.layers.Dense(3, dtype="float32" if dtype else None),
            ]
        )
        built.compile(optimizer(), "mse", metrics=["mae"], **compiling)
    return built


class Own(keras.Sequential):
    """Whose steps log what metrics do not know."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "mine": tf.reduce_mean(tf.abs(data[0]))}


def of_several():
    """An optimizer for biases and another one for the rest."""
    averaged = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}
    of_biases, of_others = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, **averaged)
    return keras.optimizers.MultiOptimizer(lambda variable: of_biases if variable.path.endswith("bias") else of_others)


def features():
    """What Keras has goes together with rounds: all processes end with equal weights and logs, and have learned."""
    ways = itertools.cycle([{"sync_every": 4, "streaming": Streaming(2, delay=1)}, {"sync_every": 3}])
    optimizers = dealt(
        (
            *([of_several] if hasattr(keras.optimizers, "MultiOptimizer") else []),
            keras.optimizers.Adam,
            lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=1.0),
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5, global_clipnorm=1.0),
            lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=4),
            lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
            lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 50), clipvalue=0.5),
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**20),
        ),
        *(0, 8),
    )
    for optimizer, arguments in zip(optimizers, ways, strict=False):
        scaled = isinstance(optimizer(), keras.optimizers.LossScaleOptimizer)
        strategy = tfdist.LocalSGDStrategy(**arguments)
        model = deep(strategy, optimizer, "mixed_float16" if scaled else None, model=Own)
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
        whole = batched(X, Y, 32)
        before = model.evaluate(whole, verbose=0)[0]
        history = fit(model, epochs=6, validation_data=batched(X[:21], Y[:21], 32), callbacks=[stopping])
        assert_alike(model)
        assert len(history["loss"]) == 2, history
        assert np.isfinite(history["mine"]).all(), history
        everyone = tfdist.all_gather(tf.constant([[history[name][-1] for name in sorted(history)]])).numpy()
        assert (everyone == everyone[0]).all(), (sorted(history), everyone)
        assert model.evaluate(whole, verbose=0)[0] < before
        assert len(model.predict(whole, verbose=0)) == ROWS


def loops():
    """Steps that a user wrote: of two optimizers in `fit`, and without `fit`."""
    strategy = tfdist.LocalSGDStrategy(sync_every=3)
    with strategy.scope():
        gan = Gan()
        gan.build((None, 5))
        gan.compile(keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.01, momentum=0.9))
    gan.fit(tf.data.Dataset.from_tensor_slices(X).batch(BATCH), epochs=2, verbose=0)
    assert_alike(gan)

    expected = Training(START, size, lambda step: 3)
    model = linear(strategy := tfdist.LocalSGDStrategy(sync_every=3))

    step = stepping(strategy, model)

    equal = [[(X[row : row + 2], Y[row : row + 2])] * size for row in range(0, 14, 2)]  # as samples are not counted
    for place, batch in enumerate(equal):
        batch = [(x + other, y) for other, (x, y) in enumerate(batch)]
        equal[place] = batch
        loss = step(*map(tf.constant, batch[rank]))
    total = float(strategy.reduce("SUM", loss, axis=None))
    np.testing.assert_allclose(total, float(tfdist.all_reduce(loss, "sum")))
    expected.epoch(equal)
    strategy.settle(model)
    assert_close(model, expected.centre)


def stopped():
    """One process ends the steps of all: they learn it in their next exchange, in an epoch that has no end."""

    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True).repeat()
    streaming = {"sync_every": 4, "streaming": Streaming(2, delay=1)}
    for arguments, steps in ((streaming, 8), *in_sweeps(({"sync_every": 3}, 9))):
        model, stops = linear(tfdist.LocalSGDStrategy(**arguments)), Stops(7 if rank == size - 1 else None)
        history = model.fit(endless, epochs=3, verbose=0, callbacks=[stops]).history
        assert stops.seen == (steps if size > 1 else 7), (arguments, stops.seen)
        assert len(history["loss"]) == 1
        assert_alike(model)
        fit(model, epochs=1)  # nobody wishes anything any more
        assert stops.seen == (steps if size > 1 else 7)
        assert_alike(model)
        before = int(model.optimizer.iterations)
        history = model.fit(endless, epochs=3, verbose=0, callbacks=[StopsBefore()] if rank == size - 1 else []).history
        assert len(history["loss"]) == 1
        assert int(model.optimizer.iterations) == before + 1, arguments
        assert_alike(model)


def again():
    """A model that is compiled and trained again, partly frozen, and with weights that were set between."""
    strategy = tfdist.LocalSGDStrategy(sync_every=3)
    model = linear(strategy)
    expected = Training(START, size, lambda step: 3)
    for _ in range(3):
        fit(model, epochs=1)
        expected.epoch(shares(ROWS))
        assert_close(model, expected.centre)
        with strategy.scope():
            model.compile(keras.optimizers.SGD(RATE), "mse")
    model.set_weights(START)
    fit(model, epochs=1)
    expected = Training(START, size, lambda step: 3)
    expected.epoch(shares(ROWS))
    assert_close(model, expected.centre)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
        fit(model, epochs=1)
        model.layers[0].trainable = False
        frozen = model.get_weights()
        model.compile(keras.optimizers.Adam(), "mse")
    fit(model, epochs=1)
    for place, (weight, other) in enumerate(zip(model.get_weights(), frozen, strict=True)):
        assert (weight == other).all() == (place < 2), place
    assert_alike(model)


def uneven():
    """A process that has fewer batches takes part in the rounds of the others, without weight."""
    batches = [5 + 3 * place for place in range(size)]
    data = [
        [(X[begin % 50 : begin % 50 + 4], Y[begin % 50 : begin % 50 + 4]) for begin in range(count)]
        for count in batches
    ]
    strategy = tfdist.LocalSGDStrategy(sync_every=4)
    model = linear(strategy)

    def dataset(context):
        x, y = (np.concatenate(part) for part in zip(*data[context.input_pipeline_id], strict=True))
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    model.fit(strategy.distribute_datasets_from_function(dataset), epochs=2, verbose=0)
    expected = Training(START, size)
    for _ in range(2):
        done = [0] * size
        while any(steps < count for steps, count in zip(done, batches, strict=True)):
            for place, process in enumerate(expected.processes):
                for x, y in data[place][done[place] : done[place] + 4]:
                    process.step(x, y)
                    done[place] += 1
            expected.end(0, expected.begin(0))
        for process in expected.processes:
            process.weights = [weight.copy() for weight in expected.centre]
    assert_close(model, expected.centre)
    assert_alike(model)


def quiet():
    """Steps between rounds send nothing, whatever the number of them."""
    sent = {}
    for steps in (6, 60):
        strategy = tfdist.LocalSGDStrategy(sync_every=1000)
        model = deep(strategy, lambda: keras.optimizers.SGD(0.01))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        before = strategy.communication()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        after = strategy.communication()
        sent[steps] = [after[name] - before[name] for name in ("collectives", "bytes")]
        assert_alike(model)
    assert sent[6] == sent[60], sent


def compressed():
    """Differences are compressed, and what is left is sent later, also after a restart."""
    strategy = tfdist.LocalSGDStrategy(sync_every=2, compression=tfdist.compression.TopK(0.1))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = fit(model, epochs=8)["loss"]
    assert losses[-1] < losses[0] / 2, losses
    assert_alike(model)
    traffic = strategy.compression()
    if size > 1:
        assert traffic, traffic
        assert all(stats["sent_bytes"] < stats["plain_bytes"] for stats in traffic.values()), traffic


def restarted():
    """`BackupAndRestore` goes on with the epoch that was under way, `ModelCheckpoint` writes what all have."""
    momentum = {"momentum": 0.5, "nesterov": True}
    cases = (
        ({"start_after": 16}, {"start_after": 16}),
        (
            {"rule": Outer(keras.optimizers.SGD(0.5, **momentum)), "streaming": Streaming(2)},
            {"fragments": 2, "outer": [Momentum(0.5, **momentum) for _ in range(2)]},
        ),
    )
    for number, (arguments, how) in enumerate(dealt(cases, 1, 2)):
        restarted_with({"sync_every": 3, **arguments}, Training(START, size, interval=lambda step: 3, **how), number)


def restarted_with(arguments, expected, number):
    place = os.path.join(FOLDER, f"backup-{size}-{number}")
    path = os.path.join(FOLDER, f"model-{size}-{number}.keras")
    with pytest.raises(KeyError, match="interrupted"):
        fit(
            linear(tfdist.LocalSGDStrategy(**arguments)),
            epochs=4,
            callbacks=[keras.callbacks.BackupAndRestore(place), keras.callbacks.ModelCheckpoint(path), Interrupts(2)],
        )
    tfdist.barrier()
    again = linear(tfdist.LocalSGDStrategy(**arguments))
    fit(again, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(place)])
    for epoch in range(4):
        expected.epoch(shares(ROWS))
        if epoch == 1:
            assert_close(keras.models.load_model(path), expected.centre)
    assert_close(again, expected.centre)
    assert_alike(again)


def refused():
    with tfdist.LocalSGDStrategy(sync_every=2).scope():
        synchronized = keras.Sequential(
            [keras.layers.Input((5,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(3)]
        )
        synchronized.compile("sgd", "mse")
    with pytest.raises(ValueError, match="all_reduce in a step: under LocalSGDStrategy each process takes its steps"):
        fit(synchronized)
    for arguments, error, message in (
        ({"sync_every": 0}, ValueError, "a whole number of steps, at least 1; got sync_every=0"),
        ({"sync_every": 2.5}, ValueError, "got sync_every=2.5"),
        ({"start_after": -1}, ValueError, "a whole number of at least 0; got -1"),
        ({"slots": "reset"}, ValueError, "'keep' or 'average'; got 'reset'"),
        ({"rule": keras.optimizers.SGD(0.7)}, TypeError, "a rule of tfdist.local_sgd"),
        ({"sync_every": 8, "streaming": Streaming(4, delay=2)}, ValueError, "choose a delay below 2"),
        ({"sync_every": 2, "streaming": Streaming(4)}, ValueError, "at least one step for each fragment; got 2 steps"),
        ({"slots": "average", "streaming": Streaming(2)}, ValueError, "exchanged at once"),
        ({"compression": "int8"}, TypeError, "int8"),
        ({"algorithm": "star"}, ValueError, "star"),
    ):
        with pytest.raises(error, match=message):
            tfdist.LocalSGDStrategy(**arguments)
    with pytest.raises(ValueError, match="factor above 1"):
        Growing(2, 10, factor=1.0)
    with pytest.raises(ValueError, match="alpha above 0"):
        QuadraticRule(0.0)
    model = linear(tfdist.LocalSGDStrategy(sync_every=9, streaming=Streaming(3)))
    with pytest.raises(ValueError, match="got fragments=3 and a model with 2"):
        fit(model)


def mismatched():
    """Processes with different rounds."""
    tfdist.LocalSGDStrategy(sync_every=4 + rank)


def endless():
    """Until a process is killed."""

    class Saying(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                print("READY", flush=True)

    strategy = tfdist.LocalSGDStrategy(sync_every=5, streaming=Streaming(2, delay=1))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    linear(strategy).fit(data, steps_per_epoch=1_000_000, verbose=0, callbacks=[Saying()])


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
