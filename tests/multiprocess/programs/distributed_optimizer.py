"""Optimizers that average gradients: each process with its share, against plain Keras with the whole batch.

Float64 throughout, so that what is left of a difference is not rounding.
"""

import contextlib
import itertools
import logging
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks

import tfdist

FOLDER = sys.argv[1]
BATCH, STEPS, WORDS, CLASSES = 12, 5, 7, 3

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
keras.backend.set_floatx("float64")
generator = np.random.default_rng(0)
X = generator.integers(0, WORDS, (BATCH * STEPS, 4))
Y = generator.integers(0, CLASSES, BATCH * STEPS)


def share(rows):
    """This process's rows of each batch."""
    return rows.reshape(STEPS, BATCH, *rows.shape[1:])[:, rank::size].reshape(-1, *rows.shape[1:])


def make_model(optimizer, dtype=None, units=6, **compiling):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(WORDS, 5, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(units, "tanh", dtype=dtype),
            keras.layers.Dense(CLASSES, dtype="float32" if dtype else None),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiling)
    return model


def fit(model, x, y, **how):
    model.fit(x, y, **{"batch_size": len(x) // STEPS, "epochs": 2, "shuffle": False, "verbose": 0, **how})
    return model


def assert_equal(actual, expected, rtol=1e-9):
    for variable, reference in zip(actual.variables, expected.variables, strict=True):
        wanted = reference.numpy()
        np.testing.assert_allclose(
            variable.numpy(), wanted, rtol=0, atol=rtol * np.abs(wanted).max(), err_msg=variable.path
        )


def assert_alike(model):
    """On all ranks, to the last bit."""
    for variable in [*model.variables, *model.optimizer.variables]:
        value = tf.convert_to_tensor(variable.value)
        everyone = tfdist.all_gather(tf.reshape(tf.cast(value, tf.float64), [1, -1]))
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0)), variable.path


OPTIMIZERS = {
    name: entry
    for name, entry in sorted(vars(keras.optimizers).items())
    if isinstance(entry, type)
    and issubclass(entry, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
}
OPTIMIZERS["LARS"] = tfdist.optimizers.LARS
SETTINGS = [
    {},
    {"clipnorm": 0.05, "weight_decay": 0.01},
    {"global_clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    {"clipvalue": 0.01, "gradient_accumulation_steps": 2},
]


def applied(optimizer, steps):
    """The variables after an optimizer has applied the gradients of some steps, in a graph."""
    variables = [keras.Variable(tensor, name=f"kernel_{place}") for place, tensor in enumerate(BEGINNING)]
    step = tf.function(lambda gradients: optimizer.apply(gradients, variables), autograph=False, reduce_retracing=True)
    optimizer.build(variables)
    for gradients in steps:
        step(gradients)
    return [tensor.numpy() for tensor in (*variables, *optimizer.variables)]


BEGINNING = [generator.normal(size=shape) for shape in ((WORDS, 5), (20, 6), (6,))]
OWN = [
    [[generator.normal(size=entry.shape) for entry in BEGINNING] for _ in range(2 * STEPS)] for _ in range(size)
]  # of each rank, in each step
ROWS = generator.integers(0, WORDS, (2 * STEPS, size, WORDS))


def sparse(values, rows):
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([WORDS, 5], tf.int64))


def of_whole(number):
    """The gradients of a step that one process would have; the rows of all, in the order of the ranks."""
    table = np.concatenate([rank_gradients[number][0] for rank_gradients in OWN]) / size
    dense = [
        tf.constant(np.mean([rank_gradients[number][place] for rank_gradients in OWN], axis=0)) for place in (1, 2)
    ]
    return [sparse(table, ROWS[number].reshape(-1)), *dense]


def of_this(number):
    table, *dense = OWN[rank][number]
    return [sparse(table, ROWS[number, rank]), *map(tf.constant, dense)]


def equal():
    """Every optimizer of Keras, as it is by default, and with each kind of settings that it takes.

    A quarter of the combinations, in which each optimizer and each kind of settings occurs; in sweeps, all.
    """
    cases = [
        (name, kind, settings)
        for row, (name, kind) in enumerate(OPTIMIZERS.items())
        for column, settings in enumerate(SETTINGS)
        if os.environ.get("TEST_SWEEP") or (row + column) % 4 == 2
    ]
    for name, kind, settings in cases:
        try:
            plain, wrapped = (kind(learning_rate=0.05, **settings) for _ in range(2))
        except ValueError:  # some take no weight decay, or no moving average
            continue
        expected = applied(plain, map(of_whole, range(2 * STEPS)))
        actual = applied(tfdist.DistributedOptimizer(wrapped), map(of_this, range(2 * STEPS)))
        for place, (value, other) in enumerate(zip(actual, expected, strict=True)):
            if "gradient_accumulation_steps" in settings and place >= len(BEGINNING):
                continue  # what has been accumulated is a process's own
            limit = 1e-7 * np.abs(other).max()
            np.testing.assert_allclose(value, other, rtol=0, atol=limit, err_msg=f"{name} {settings} {place}")
        everyone = tfdist.all_gather(tf.constant(np.concatenate([value.ravel() for value in actual[:3]])[None])).numpy()
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0)), (name, settings)


class Halved(keras.optimizers.SGD):
    """With an ``update_step`` of its own."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.multiply(gradient, learning_rate / 2))


def of_several():
    """An optimizer for biases and another one for kernels, which are asked for when it is built."""
    of_biases, of_others = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, clipnorm=0.1)
    return keras.optimizers.MultiOptimizer(lambda variable: of_biases if variable.path.endswith("bias") else of_others)


def ways():
    """Own optimizers, backward passes, schedules, and sums."""
    assert_equal(
        fit(make_model(tfdist.DistributedOptimizer(Halved(0.1))), share(X), share(Y)),
        fit(make_model(Halved(0.1)), X, Y),
    )
    accumulating = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
    passes = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=3)
    assert_equal(fit(make_model(passes), share(X), share(Y)), fit(make_model(accumulating), X, Y))
    rates = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    scheduled = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(rates)))
    assert_equal(fit(scheduled, share(X), share(Y)), fit(make_model(keras.optimizers.SGD(rates)), X, Y))
    sums = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1 / size), average=False))
    assert_equal(fit(sums, share(X), share(Y)), fit(make_model(keras.optimizers.SGD(0.1)), X, Y))
    if os.environ.get("TEST_SWEEP"):
        further_ways()


def further_ways():
    """Eager steps, several in a call, a rate that a callback sets, and several optimizers."""
    eager = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), run_eagerly=True)
    assert_equal(fit(eager, share(X), share(Y)), fit(make_model(keras.optimizers.Adam(0.1)), X, Y))
    several = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), steps_per_execution=3)
    assert_equal(fit(several, share(X), share(Y)), fit(make_model(keras.optimizers.Adam(0.1)), X, Y))
    rate = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.3 / (epoch + 1))]
    called = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    expected = fit(make_model(keras.optimizers.SGD(0.1)), X, Y, callbacks=rate)
    assert_equal(fit(called, share(X), share(Y), callbacks=rate), expected)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        model = make_model(tfdist.DistributedOptimizer(of_several()))
        assert_equal(fit(model, share(X), share(Y)), fit(make_model(of_several()), X, Y))


def looped(model, optimizer, x, y, wrap):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for part_x, part_y in zip(np.split(x, STEPS), np.split(y, STEPS), strict=True):
        step(part_x, part_y)
    return model


def loops():
    """A tape that averages, and an optimizer that does, in loops; the same with variables of one's own."""
    model = make_model(keras.optimizers.SGD())
    expected = looped(model, keras.optimizers.Adam(0.1), X, Y, lambda tape: tape)
    for optimizer, wrap in (
        (keras.optimizers.Adam(0.1), tfdist.DistributedGradientTape),
        (tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), lambda tape: tape),
    ):
        model = make_model(keras.optimizers.SGD())
        assert_equal(looped(model, optimizer, share(X), share(Y), wrap), expected)
    local_source, common = tf.Variable([1.0]), tf.Variable([2.0])
    with tfdist.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(local_source * (rank + 1.0) + common * (rank + 1.0))
    tape.register_local_source(local_source)
    gradients = tape.gradient(loss, {"local": local_source, "common": common, "none": tf.Variable([0.0])})
    np.testing.assert_allclose(gradients["local"], [(rank + 1) / size])
    np.testing.assert_allclose(gradients["common"], [(size + 1) / 2])
    assert gradients["none"] is None


def local():
    """A variable whose gradients are a process's own; gradients that are clipped before the sum."""
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=False))
    model.optimizer.register_local_var(model.layers[-1].bias)
    fit(model, share(X), share(Y))
    everyone = tfdist.all_gather(model.layers[-1].bias.value[None])
    assert len(np.unique(everyone, axis=0)) == size
    clipped = tf.Variable([0.0, 0.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), local_clip_norm=1.0, local_clip_value=0.5)
    optimizer.apply([tf.constant([3.0 * (rank + 1), 4.0])], [clipped])
    gradients = [np.array([3.0 * (other_rank + 1), 4.0]) for other_rank in range(size)]
    expected = -np.mean([np.clip(gradient / np.linalg.norm(gradient), -0.5, 0.5) for gradient in gradients], axis=0)
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def mixed():
    """Loss scales around the optimizer and inside of it; one process's infinity skips the step everywhere."""
    keras.backend.set_floatx("float32")
    scale, wrap = keras.optimizers.LossScaleOptimizer, tfdist.DistributedOptimizer
    for scaled in (
        lambda optimizer: scale(wrap(optimizer), initial_scale=8.0),
        lambda optimizer: wrap(scale(optimizer, initial_scale=8.0)),
        wrap,  # Keras scales by itself
    ):
        model = fit(make_model(scaled(keras.optimizers.SGD(0.1)), dtype="mixed_float16"), share(X), share(Y))
        plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        assert_equal(model, fit(make_model(plain, dtype="mixed_float16"), X, Y), 5e-3)
        assert_alike(model)
    variable = tf.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0)), 8.0)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    optimizer.build([variable])
    step(tf.constant([np.inf if rank == size - 1 else 8.0]))
    assert variable.numpy() == [1.0]
    assert float(optimizer.dynamic_scale) == 4
    step(tf.constant([4.0 * rank]))
    np.testing.assert_allclose(variable, [1 - (size - 1) / 2])


def compressed():
    """Compresses the gradient of a large variable; the elements that are left out come later."""
    variable = tf.Variable(tf.zeros([64, 64]))
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), tfdist.compression.TopK(0.25))
    gradient = tf.reshape(tf.range(1.0, 4097) * (rank + 1), [64, 64])
    optimizer.apply([gradient], [variable])
    mean = -np.arange(1, 4097).reshape(64, 64) * np.mean(np.arange(1, size + 1))
    np.testing.assert_allclose(variable, np.where(np.arange(4096).reshape(64, 64) < 3072, 0, mean), rtol=1e-6)
    for _ in range(3):
        optimizer.apply([tf.zeros([64, 64])], [variable])
    np.testing.assert_allclose(variable, mean, rtol=1e-6)


def adaptive():
    """What agrees is averaged, what is orthogonal is added; each variable by itself."""
    variables = [tf.Variable(tf.zeros([size])), tf.Variable([0.0, 0.0]), tf.Variable(tf.zeros([3, 1]))]
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), op=tfdist.Adasum, sparse_as_dense=True)
    rows = tf.IndexedSlices([[1.0]], [0], tf.constant([3, 1], tf.int64))
    tf.function(lambda: optimizer.apply([tf.one_hot(rank, size), tf.constant([3.0, 4.0]), rows], variables))()
    np.testing.assert_allclose(variables[0], -np.ones(size), rtol=1e-6)
    np.testing.assert_allclose(variables[1], [-3, -4], rtol=1e-6)
    np.testing.assert_allclose(variables[2], [[-1], [0], [0]], rtol=1e-6)
    orthogonal, parallel = tfdist.all_reduce([tf.one_hot(rank, size), tf.constant([5.0], tf.bfloat16)], tfdist.Adasum)
    np.testing.assert_allclose(orthogonal, np.ones(size), rtol=1e-6)
    assert float(parallel[0]) == 5


def drawn(place, update, process):
    """The noise of a rank."""
    folded = tf.constant([0, place], tf.int64)
    for part in (update, process):
        folded = tf.random.experimental.stateless_fold_in(folded, tf.constant(part, tf.int64))
    return tf.random.stateless_normal(BEGINNING[place].shape, folded, dtype=tf.float64, alg="philox").numpy()


def whole_table(number, process):
    """A rank's gradient of the table, which is sparse."""
    return tf.convert_to_tensor(sparse(OWN[process][number][0], ROWS[number, process])).numpy()


def noisy():
    """Each rank adds noise by the variance of its own parts, or all the same noise to the mean; the bits are equal."""
    noise, wrap = tfdist.optimizers.GradientNoise, tfdist.DistributedOptimizer

    def inner(**settings):
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, **settings)

    expected = [value.copy() for value in BEGINNING]
    isotropic = [value.copy() for value in BEGINNING]
    for update, place in itertools.product(range(STEPS), range(len(BEGINNING))):
        means = []
        for process in range(size):
            numbers = (2 * update, 2 * update + 1)
            parts = np.stack(
                [OWN[process][number][place] if place else whole_table(number, process) for number in numbers]
            )
            means.append(parts.mean(axis=0))
            deviation = np.sqrt(7 * parts.var(axis=0, ddof=1) / 2)
            expected[place] -= (means[-1] + deviation * drawn(place, update, process)) / size
        isotropic[place] -= np.clip(np.mean(means, axis=0) + 0.5 * drawn(place, update, 0), -0.2, 0.2)
    equal = {"structure": "isotropic", "stddev": 0.5}
    for made, wanted in (
        (wrap(noise(inner(), 8)), expected),
        (noise(wrap(inner()), 8), expected),
        (wrap(noise(keras.optimizers.SGD(1.0), 8), backward_passes_per_step=2), expected),
        (wrap(noise(inner(clipvalue=0.2), **equal)), isotropic),
        (noise(wrap(inner(clipvalue=0.2)), **equal), isotropic),
    ):
        actual = applied(made, map(of_this, range(2 * STEPS)))[: len(BEGINNING)]
        for value, other in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)
        everyone = tfdist.all_gather(tf.constant(np.concatenate([value.ravel() for value in actual])[None])).numpy()
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0))


def groups():
    """Two groups train apart; an algorithm of one's own."""
    ranks = [list(range(0, size, 2)), list(range(1, size, 2))]
    made = [tfdist.Group(group_ranks) for group_ranks in ranks]
    members, place = ranks[rank % 2], rank // 2
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), group=made[rank % 2], algorithm="butterfly")
    variable = tf.Variable([0.0])
    optimizer.apply([tf.constant([rank + 1.0])], [variable])
    np.testing.assert_allclose(variable, [-np.mean([member + 1 for member in members])])
    assert members[place] == rank


def saved():
    """Files are those of plain Keras, with and without tfdist, and training goes on where it was."""
    path = os.path.join(FOLDER, f"model-{rank}.keras")
    wrapped = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    fit(wrapped, share(X), share(Y)).save(path)
    config = keras.optimizers.serialize(wrapped.optimizer)
    assert config == keras.optimizers.serialize(keras.optimizers.Adam.from_config(wrapped.optimizer.get_config()))
    assert type(keras.optimizers.deserialize(config)) is keras.optimizers.Adam
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert_equal(loaded.optimizer, wrapped.optimizer, 0)
    tfdist.DistributedOptimizer(loaded.optimizer)
    expected = fit(fit(make_model(keras.optimizers.Adam(0.1)), X, Y), X, Y)
    assert_equal(fit(loaded, share(X), share(Y)), expected, 1e-7)


def uneven():
    """A process that has fewer batches joins, as with functions."""
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = tf.Variable([0.0])
    optimizer.build([variable])
    for _ in range(2 if rank == 0 else 3):
        optimizer.apply([tf.constant([float(size)])], [variable])
    last = tfdist.join()
    tfdist.broadcast_variables([variable], root_rank=last)
    np.testing.assert_allclose(variable, [-(2.0 * size + size - 1)])


class Seen(keras.callbacks.Callback):
    """Logs of epochs, as callbacks see them."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


@contextlib.contextmanager
def warnings():
    """What tfdist logs."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tfdist").addHandler(handler)
    yield messages
    logging.getLogger("tfdist").removeHandler(handler)


def begins_with_own_accumulators():
    """What a process accumulates in the first batch, and what is its own, is not sent with what that batch has made."""
    steps = {"gradient_accumulation_steps": 2}
    plain = make_model(keras.optimizers.SGD(0.1, **steps))
    fit(plain, X, Y)
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, **steps)))
    fit(model, share(X), share(Y), callbacks=[tfdist.callbacks.BroadcastVariables(size - 1)])
    for weight, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-9)
    for begins in ([], [tfdist.callbacks.BroadcastVariables(size - 1)]):
        model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
        model.optimizer.register_local_var(model.trainable_variables[-1])
        fit(model, share(X), share(Y), callbacks=begins)
        bias = model.trainable_variables[-1].numpy()
        if not begins:
            without = bias
    np.testing.assert_array_equal(bias, without)


def callbacks():
    """Weights from the root, averages of logs, one decision, and the rate of the whole batch."""
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), metrics=["accuracy"])
    for variable in model.variables:
        variable.assign(variable + rank)
    expected = [variable.numpy() for variable in model.variables]
    for place, value in enumerate(expected):
        expected[place] = tfdist.broadcast(value, root_rank=size - 1).numpy()
    begun = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: [
            np.testing.assert_array_equal(variable.numpy(), other)
            for variable, other in zip(model.variables, expected, strict=True)
            if batch == 0 and model.optimizer.iterations.numpy() == 0
        ]
    )
    before, after, stop = Seen(), Seen(), keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1.0)
    given = [
        tfdist.callbacks.BroadcastVariables(size - 1),
        tfdist.callbacks.LearningRateScaling(0.01, "sqrt", warmup_epochs=1),
        begun, before, tfdist.callbacks.MetricAverage(), after, stop,
    ]  # fmt: skip
    fit(model, share(X), share(Y), callbacks=given, validation_data=(share(X)[rank:], share(Y)[rank:]))
    assert_alike(model)
    assert set(after.logs[0]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for local_logs, mean in zip(before.logs, after.logs, strict=True):
        for name, value in local_logs.items():
            everyone = tfdist.all_gather(tf.constant([[value, mean[name]]], tf.float64)).numpy()
            np.testing.assert_allclose(everyone[:, 1], everyone[:, 0].mean(), rtol=1e-9, err_msg=name)
    assert model.history.history["val_loss"] == [record["val_loss"] for record in after.logs]
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.01 * size**0.5, rtol=1e-6)
    begins_with_own_accumulators()
    other = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    other.optimizer.register_local_var(other.variables[0])
    for place, told in ((0, 0), (1, 1)):  # only the first may differ
        other.variables[place].assign_add(tf.fill(other.variables[place].shape, tf.cast(rank, tf.float64)))
        with warnings() as messages:
            fit(other, share(X), share(Y))
        assert len([record for record in messages if "begin to train with different weights" in record]) == told, (
            messages
        )
    layers = [keras.layers.Input((4,)), keras.layers.BatchNormalization(synchronized=True)]
    other = keras.Sequential(layers)
    other.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with warnings() as messages:
        fit(other, share(X) * 1.0, share(X) * 1.0, epochs=1)
    assert len([record for record in messages if "synchronized=True has no effect" in record]) == 1, messages
    for callback, wrong in (
        (
            tfdist.callbacks.BroadcastVariables(),
            {"optimizer": keras.optimizers.Adam() if rank else keras.optimizers.SGD()},
        ),
        (tfdist.callbacks.MetricAverage(), {"optimizer": keras.optimizers.SGD(), "metrics": ["accuracy"] * rank}),
    ):
        other = make_model(**wrong)
        with pytest.raises(tfdist.MismatchError, match=f"{type(callback).__name__}: rank"):
            fit(other, share(X), share(Y), callbacks=[callback])


class Halves(keras.callbacks.Callback):
    """Sets rates and weights as each epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])


def set_by_callbacks():
    """Weights and rates that all processes' callbacks set are those of one process."""
    expected = fit(make_model(keras.optimizers.SGD(0.1)), X, Y, callbacks=[Halves()])
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert_equal(fit(model, share(X), share(Y), callbacks=[Halves()]), expected)
    assert_alike(model)


class Ends(keras.callbacks.Callback):
    """Interrupts training in an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise KeyError("interrupted")


def resumed():
    """The root alone loads a model with its optimizer, and the others get all of it."""
    path = os.path.join(FOLDER, "resumed.keras")
    model = make_model(keras.optimizers.Adam(0.1))
    if rank == 0:
        fit(model, X, Y)
        model.save(path)
        model = keras.models.load_model(path)
    model.compile(tfdist.DistributedOptimizer(model.optimizer), model.loss)
    seen = []
    begins = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: (
            seen or seen.extend(variable.numpy() for variable in model.optimizer.variables)
        )
    )
    fit(model, share(X), share(Y), epochs=1, callbacks=[tfdist.callbacks.BroadcastVariables(), begins])
    for value in seen:
        everyone = tfdist.all_gather(tf.constant(value[None])).numpy()
        assert (everyone == everyone[:1]).all()
    assert int(seen[0]) == 2 * STEPS, "the root's iterations"
    assert_alike(model)


def committed():
    """Training that was interrupted goes on where it was, with all that each process had kept back."""
    for compression in (None, tfdist.compression.TopK(0.25)):
        place = os.path.join(FOLDER, f"committed-{compression is None}")

        def made(compression=compression):
            optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1), compression)
            return make_model(optimizer, units=300)

        expected = made()
        expected.fit(share(X), share(Y), batch_size=BATCH // size, epochs=4, shuffle=False, verbose=0)
        with pytest.raises(KeyError, match="interrupted"):
            fit(made(), share(X), share(Y), epochs=4, callbacks=[tfdist.callbacks.CommitState(place), Ends(2)])
        tfdist.barrier()
        again = made()
        for variable in again.variables:
            variable.assign(variable + rank)  # what it begins with does not count
        history = fit(again, share(X), share(Y), epochs=4, callbacks=[tfdist.callbacks.CommitState(place)])
        assert again.history.epoch == [2, 3], history
        assert_alike(again)
        assert_equal(again, expected)
        assert_equal(again.optimizer, expected.optimizer)
        tfdist.barrier()
        assert not os.path.exists(place)
        tfdist.barrier()
    commits = [
        tfdist.callbacks.CommitState(place, save_freq=1),
        keras.callbacks.LambdaCallback(on_train_batch_end=stop),
    ]
    with pytest.raises(KeyError, match="in the first epoch"):
        fit(made(), share(X), share(Y), callbacks=commits)
    tfdist.barrier()
    again = made()
    for variable in again.variables:
        variable.assign(variable + rank)
    fit(again, share(X), share(Y), callbacks=[tfdist.callbacks.CommitState(place)])
    assert_alike(again)
    tfdist.barrier()
    if rank == 0:
        os.makedirs(place)
        with open(os.path.join(place, "latest.weights.h5"), "w") as file:
            file.write("not a file of weights")
    tfdist.barrier()
    with pytest.raises(RuntimeError, match=r"cannot be read: |see the error of rank 0"):
        fit(made(), share(X), share(Y), callbacks=[tfdist.callbacks.CommitState(place)])


def stop(batch, logs):
    raise KeyError("in the first epoch")


def refused():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    for wrong, error, message in (
        (lambda: tfdist.DistributedOptimizer(optimizer), ValueError, "averages its gradients already"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), ValueError, "already"),
        (lambda: tfdist.DistributedOptimizer("adam"), TypeError, "takes a Keras 3 optimizer"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), ValueError, "got 0"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), algorithm="star"), ValueError, "star"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), local_clip_norm=-1.0), ValueError, "positive"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), op="max"), ValueError, "got 'max'"),
        (
            lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), tfdist.compression.Int8(), op=tfdist.Adasum),
            ValueError,
            "leave out compression=",
        ),
        (
            lambda: tfdist.all_reduce(tf.constant([1]), tfdist.Adasum),
            TypeError,
            r"floating-point tensors; got \['int32",
        ),
        (
            lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), op=tfdist.Adasum).apply(
                [sparse(np.ones([1, 5]), [0])], [tf.Variable(tf.zeros([WORDS, 5], tf.float64))]
            ),
            TypeError,
            "pass sparse_as_dense=True",
        ),
        (lambda: tfdist.DistributedGradientTape(None), TypeError, "takes a tf.GradientTape"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD()))
        with pytest.raises(RuntimeError, match="works without a strategy"):
            fit(model, X, Y)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
