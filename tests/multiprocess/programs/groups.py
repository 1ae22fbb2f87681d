"""Groups of processes train as plain Keras does in one process, on the same global batches.

First ranks 3, 0 and 2 train in this order, most models on two devices each, while rank 1 does the same with plain
Keras. Then groups overlap: rank 1 trains a model with rank 0 and another with rank 2 in turn, while rank 3 does both
with plain Keras.
"""

import contextlib
import functools
import json
import math
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks

import tfdist
from tfdist import compression
from tfdist.collectives.cost import TYPICAL
from tfdist.engine import calibration

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
calibrated = Path(sys.argv[1]) / f"calibration-{os.getpid()}"
os.environ[calibration.VARIABLE] = str(calibrated)  # of the whole job, and used in all of its groups
calibration.store(TYPICAL, calibration.machine((0, 0, 0, 0)))
tfdist.init()
rank = tfdist.rank()
trio = tfdist.Group([3, 0, 2])
in_trio = rank in trio.ranks
ALONE = 1  # trains with plain Keras
folder = Path(sys.argv[1])
own_folder = folder / f"rank{rank}"
own_folder.mkdir()

random = np.random.default_rng(5)
X = random.normal(size=(37, 6))  # in batches of 16 the last has 5 samples, for 6 replicas
Y = np.tanh(X.sum(axis=1, keepdims=True))
WORDS = random.integers(0, 20, (37, 4))
WEIGHTS = np.linspace(0.5, 2, 37)
SETTINGS = {"batch_size": 16, "shuffle": False, "verbose": 0}
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)  # arrays have a check of their own, and are traced longer


def strategy_of_trio(devices=2, **arguments):
    """A strategy of the trio; None for the process that trains alone."""
    names = [f"CPU:{device}" for device in range(devices)]
    return tfdist.AllReduceStrategy(devices=names, group=trio, **arguments) if in_trio else None


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def network(strategy, optimizer="sgd", **arguments):
    keras.utils.set_random_seed(1 + rank)  # the chief's initial values count
    with scope(strategy):
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(synchronized=True)]
        model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1)])
        arguments = {"run_eagerly": strategy is None, **arguments}  # the reference would trace longer than it trains
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", metrics=["mae"], **arguments)
    start_alike(model)
    return model


def with_momentum():
    """An optimizer that has slots, and less to trace than Adam."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def start_alike(model):
    shapes = [weight.shape for weight in model.get_weights()]
    draw = np.random.default_rng(3)
    if rank in (ALONE, trio.ranks[0]):  # the others get the chief's through `load_weights`
        model.set_weights([draw.normal(scale=0.3, size=shape) ** 2 for shape in shapes])
    path = own_folder / "start.weights.h5"
    model.save_weights(path)
    model.load_weights(path)


def numbers(*parts):
    """All numbers in nested results, in one vector."""
    flat = [np.asarray(part, np.float64).ravel() for part in keras.tree.flatten(parts)]
    return np.concatenate(flat)


def compared(train, tolerance=1e-9):
    """A check that the numbers of all ranks but plain Keras's are bitwise equal, and close to those."""

    def check():
        everyone = tfdist.all_gather(train()[np.newaxis]).numpy()
        expected, others = everyone[ALONE], np.delete(everyone, ALONE, axis=0)
        np.testing.assert_array_equal(others, others[:1].repeat(len(others), 0))
        np.testing.assert_allclose(others[0], expected, rtol=0, atol=tolerance * np.abs(expected).max())

    return check


# The trio and plain Keras.


@compared
def arrays():
    strategy = strategy_of_trio()
    model = network(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", min_delta=0.5, patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=0.5, patience=0, factor=0.5),
    ]
    given = {"sample_weight": WEIGHTS, "validation_data": DATA.take(1), "callbacks": callbacks, **SETTINGS}
    history = model.fit(X, Y, epochs=9, **given).history
    assert len(history["loss"]) < 9
    evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
    return numbers(history, evaluated, model.predict(X, batch_size=16, verbose=0), model.get_weights())


@compared
def words():
    """Sparse gradients of an embedding, from tf.data."""
    strategy = strategy_of_trio()
    with scope(strategy):
        layers = [keras.layers.Embedding(20, 5), keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")]
        model = keras.Sequential([keras.layers.Input((4,), dtype="int32"), *layers])
        model.compile(with_momentum(), "binary_crossentropy", metrics=["accuracy"], run_eagerly=strategy is None)
    start_alike(model)
    data = tf.data.Dataset.from_tensor_slices((WORDS, 1.0 * (Y > 0))).batch(16)
    history = model.fit(data, epochs=3, class_weight={0: 1.0, 1: 3.0}, verbose=0).history
    return numbers(history, model.get_weights())


@functools.partial(compared, tolerance=2e-2)
def scaled_loss():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network(strategy_of_trio(devices=1))
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return numbers(model.fit(X, Y, epochs=3, **SETTINGS).history["loss"], model.get_weights())
    finally:
        keras.config.set_dtype_policy("float64")


@compared
def own_loop():
    strategy = strategy_of_trio() or tf.distribute.get_strategy()
    with strategy.scope():
        kernel = tf.Variable(np.ones((6, 1)))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([kernel])

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ kernel - y) ** 2) / 16
        optimizer.apply([tape.gradient(loss, kernel)], [kernel])
        return loss, x[:, 0]

    @tf.function(autograph=False)  # a conversion takes longer than the steps
    def train(x, y):
        loss, seen = strategy.run(step, args=(x, y))
        return strategy.reduce("SUM", loss, axis=None), strategy.gather(seen, axis=0)

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(16))
    return numbers([train(x, y) for x, y in data], kernel)


@compared
def interrupted():
    """The first member alone writes; a second model continues as if there had been only one."""

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    strategy = strategy_of_trio(devices=1)
    backup = own_folder / "backup"
    writing = [keras.callbacks.ModelCheckpoint(own_folder / "{epoch}.keras"), keras.callbacks.BackupAndRestore(backup)]
    with pytest.raises(RuntimeError, match="interrupted"):
        network(strategy, with_momentum).fit(DATA, epochs=4, callbacks=[*writing, Interruption()], verbose=0)
    is_writer = rank in (1, 3)
    assert backup.exists() == is_writer
    assert sorted(file.name for file in own_folder.glob("*.keras")) == (["1.keras", "2.keras"] if is_writer else [])
    model = network(strategy, with_momentum)
    history = model.fit(DATA, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(backup)], verbose=0).history
    assert len(history["loss"]) == 2
    shared = folder / f"of {'three' if in_trio else 'one'}.keras"
    model.save(shared)
    with scope(strategy):
        loaded = keras.models.load_model(shared)
    return numbers(history, loaded.get_weights(), loaded.optimizer.variables)


@compared
def compressed():
    """A compression that loses nothing is none."""
    methods = compression.by_size({0: compression.TopK(1.0), 40: compression.PowerSGD(6)})
    strategy = strategy_of_trio(compression=methods)
    model = network(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(X, Y, epochs=3, **SETTINGS).history
    if strategy is not None:
        assert len(strategy.compression()) == 6
        assert all(traffic["sent_bytes"] for traffic in strategy.compression().values())
    return numbers(history, model.get_weights())


def lossy():
    """Residuals are those of each rank, and are saved by each. A timeline is written once, with ranks of the job."""
    if not in_trio:
        return
    path, timeline = folder / "lossy.keras", own_folder / "timeline.json"
    communication = tfdist.callbacks.Communication()
    callbacks = [communication, tfdist.callbacks.Timeline(timeline)]
    for resumed in (False, True):
        strategy = strategy_of_trio(1, compression=compression.by_size({0: compression.TopK(0.25)}))
        model = network(strategy)
        if resumed:
            strategy.restore_compression(path)
        model.fit(X, Y, epochs=2, callbacks=[] if resumed else callbacks, **SETTINGS)
        model.save(path)
        gathered = strategy.gather(tf.constant(numbers(model.get_weights()))[np.newaxis], axis=0).numpy()
        np.testing.assert_array_equal(gathered, gathered[:1].repeat(3, 0))
        steps = {tensor.state.step for tensor in strategy.extended.compressor._tensors.values() if tensor}
        assert steps == {12 if resumed else 6}, steps
    names = sorted(file.name for file in folder.glob("lossy.keras.*"))
    assert names == [f"lossy.keras.compression-{place}-of-3.npz" for place in range(3)], names

    assert len(communication.history["mib_sent"]) == 2
    assert set(communication.history["slowest_rank"]) <= {-1.0, 0.0, 2.0, 3.0}
    assert timeline.exists() == (rank == 3)
    if timeline.exists():
        events = json.loads(timeline.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 2, 3}


def messages():
    """Ranks in messages are the job's."""
    if not in_trio:
        for call in (strategy_outside, lambda: tfdist.barrier(group=trio)):
            with pytest.raises(ValueError, match=r"rank 1 is not in Group\(\[3, 0, 2\]\)"):
                call()
        return

    class Differs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 2:
                self.model.layers[0].kernel.assign_add(self.model.layers[0].kernel)

    model = network(strategy_of_trio(devices=1))
    expected = rf"rank {rank}: after epoch 1 .*dense.*kernel differs between rank 3 and rank\(s\) \[2\]"
    with pytest.raises(tfdist.MismatchError, match=expected):
        model.fit(DATA, callbacks=[Differs()], verbose=0)
    with pytest.raises(OSError, match="missing.weights.h5" if rank == 3 else "see the error of rank 3"):
        model.load_weights(own_folder / "missing.weights.h5")
    with pytest.raises(ValueError, match=f"between two different ranks; got {rank} for both"):
        tfdist.send(tf.ones(1), rank, group=trio)
    if rank == 3:
        tfdist.send(tf.ones([2, 3]), 2, "rows", trio)
    if rank == 2:
        expected = r"rank 2 expected float32 \(None, 5\) along the edge 'rows' of Group\(\[3, 0, 2\]\) from rank 3"
        with pytest.raises(tfdist.MismatchError, match=expected):
            tfdist.receive(tf.TensorSpec([None, 5]), 3, "rows", trio)


def strategy_outside():
    tfdist.AllReduceStrategy(group=trio)


# Groups that overlap.

pairs = [tfdist.Group([0, 1]), tfdist.Group([2, 1])]
mine = [pair for pair in pairs if rank in pair.ranks]
turned = tfdist.Group([1, 0])


def trained_in_turn(seed, strategies):
    """Models of the same names, trained in turns; what each comes to."""
    models = []
    for strategy, units in strategies:
        keras.utils.set_random_seed(seed)
        with scope(strategy):
            layers = [keras.layers.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
            models.append(keras.Sequential(layers))
            models[-1].compile(with_momentum(), "mse", run_eagerly=strategy is None)
    predictions = [[] for _ in models]
    for epoch in range(2):
        for model, parts, (_, units) in zip(models, predictions, strategies, strict=True):
            model.fit(DATA, epochs=epoch + 1, initial_epoch=epoch, verbose=0)
            path = own_folder / f"{units}.weights.h5"
            model.save_weights(path)
            model.load_weights(path)
            parts.append(model.predict(DATA, verbose=0))
    return [numbers(parts, model.get_weights()) for parts, model in zip(predictions, models, strict=True)]


def in_turn():
    sizes = [7, 9]
    strategies = [
        (tfdist.AllReduceStrategy(group=pair) if rank != 3 else None, units)
        for pair, units in zip(pairs, sizes, strict=True)
        if pair in mine or rank == 3
    ]
    trained = dict(zip([units for _, units in strategies], trained_in_turn(11, strategies), strict=True))
    for units in sizes:
        result = trained.get(units)
        length = 2 * 37 + 6 * units + units + units + 1
        everyone = tfdist.all_gather(np.full((1, length), math.nan) if result is None else result[np.newaxis]).numpy()
        rows = [row for process, row in enumerate(everyone) if process in pairs[sizes.index(units)].ranks]
        np.testing.assert_array_equal(rows[0], rows[1])
        np.testing.assert_allclose(rows[0], everyone[3], rtol=0, atol=1e-9)


@tf.function
def over_each(value):
    return [
        (tfdist.all_reduce(value, "sum", group=pair), tfdist.all_gather(value, group=pair), nested(pair)(value))
        for pair in mine
    ]


def nested(pair):
    @tf.function
    def total(value):
        return tfdist.all_reduce(value, "sum", group=pair)

    return total


def over_two_groups_in_one_graph():
    for pair, (total, gathered, again) in zip(mine, over_each(tf.constant([10.0**rank])), strict=True):
        wanted = [10.0**member for member in pair.ranks]
        assert gathered.numpy().tolist() == wanted
        assert total.numpy().tolist() == again.numpy().tolist() == [sum(wanted)]


def edges():
    """An edge belongs to its group, also where two groups have both ends."""
    if rank == 0:
        for value, group in enumerate((None, pairs[0], turned)):
            tfdist.send(tf.constant([float(value)]), 1, group=group)
    if rank == 1:
        for value, group in reversed(list(enumerate((None, pairs[0], turned)))):
            assert tfdist.receive(tf.TensorSpec([1]), 0, group=group).numpy().tolist() == [value]


def broadcast():
    if rank in turned.ranks:
        variable = tf.Variable([float(rank)])
        tfdist.broadcast_variables([variable], root_rank=0, group=turned)
        assert variable.numpy().tolist() == [0.0]


run_checks(globals())
tfdist.barrier()
