"""Trains many small models the same way on any number of processes and devices; prints what came out.

Each case is a function of a strategy that returns numbers. They must not depend on how the batch was dealt out,
nor on the rank that asks. `test_equal_mathematics.py` compares them with one process.
"""

import json
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

DEVICES = int(os.environ.get("TEST_DEVICES", "1"))
if DEVICES > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

strategy = tfdist.AllReduceStrategy(devices=[f"CPU:{index}" for index in range(DEVICES)])
CASES = {}
SPREAD = set()  # cases that also run on three processes and on two devices a process

digits = load_digits()
X = (digits.data / 16.0)[:203]
Y = digits.target[:203]


def case(function):
    CASES[function.__name__] = function
    return function


def spread(function):
    SPREAD.add(function.__name__)
    return case(function)


def mlp(optimizer="sgd", units=12, metrics=("accuracy",), loss=None, layers=(), **compile_arguments):
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(units, activation="tanh"), *layers, keras.layers.Dense(10)]
        )
        model.compile(
            optimizer if not callable(optimizer) else optimizer(),
            loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=list(metrics),
            **compile_arguments,
        )
    return model


def numbers(model, history=None):
    found = {"weights": [np.asarray(w, np.float64).ravel().tolist() for w in model.get_weights()]}
    if history is not None:
        found["history"] = history.history
    return found


def fitted(model, x=X, y=Y, **arguments):
    settings = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    return numbers(model, model.fit(x, y, **settings) if y is not None else model.fit(x, **settings))


# fit, and the data it takes. 203 samples in batches of 32: the last batch holds 11.


@spread
def arrays_with_a_partial_batch():
    return fitted(mlp(), validation_data=(X[:50], Y[:50]))


@spread
def a_last_batch_of_one():
    return fitted(mlp(), X[:33], Y[:33])


@spread
def fewer_samples_than_workers():
    return fitted(mlp(), X[:1], Y[:1])


@spread
def batch_not_divisible():
    return fitted(mlp(), batch_size=7)


@spread
def dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(30)
    return fitted(mlp(), data, None, batch_size=None)


@case
def infinite_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(30).repeat()
    return fitted(mlp(), data, None, batch_size=None, steps_per_epoch=9)


@spread
def evaluation():
    model = mlp()
    return {"logs": model.evaluate(X, Y, batch_size=20, verbose=0, return_dict=True)}


@spread
def prediction():
    model = mlp()
    return {"outputs": model.predict(X, batch_size=25, verbose=0).tolist()}


@case
def prediction_in_larger_executions():
    model = mlp(steps_per_execution=3)
    return {"outputs": model.predict(X, batch_size=25, verbose=0).tolist()}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        part = slice(index * 31, (index + 1) * 31)
        return X[part], Y[part]


@case
def pydataset():
    return fitted(mlp(), Batches(), None, batch_size=None)


@case
def pydataset_shuffled_with_a_seed_on_one_rank_only():
    # The order is the chief's; what it is depends on nothing that one process could repeat, so compare ranks only.
    model = mlp()
    model.fit(Batches(), epochs=2, shuffle=True, verbose=0)
    return {"ranks_only": numbers(model)["weights"]}


@case
def arrays_shuffled_without_a_seed():
    model = mlp()
    seen = model.fit(X, np.arange(203) % 10, batch_size=203, epochs=1, shuffle=True, verbose=0).history
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=True, verbose=0)
    return {"history": seen, "ranks_only": numbers(model)["weights"]}


@case
def arrays_shuffled_with_a_seed():
    model = mlp()
    keras.utils.set_random_seed(5)
    found = fitted(model, shuffle=True)
    tf.random.set_seed(None)
    return found


@case
def generator():
    def batches():
        while True:
            for index in range(7):
                yield X[index * 31 : (index + 1) * 31], Y[index * 31 : (index + 1) * 31]

    return fitted(mlp(), batches(), None, batch_size=None, steps_per_epoch=7)


@case
def several_inputs_and_outputs():
    with strategy.scope():
        a, b = keras.Input((32,), name="a"), keras.Input((32,), name="b")
        hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.concatenate([a, b]))
        digit = keras.layers.Dense(10, name="digit")(hidden)
        parity = keras.layers.Dense(1, name="parity")(hidden)
        model = keras.Model({"a": a, "b": b}, {"digit": digit, "parity": parity})
        model.compile(
            "adam",
            {"digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "parity": "mse"},
            metrics={"digit": ["accuracy"], "parity": ["mae"]},
        )
    x, y = {"a": X[:, :32], "b": X[:, 32:]}, {"digit": Y, "parity": (Y % 2).reshape(-1, 1).astype("float64")}
    found = fitted(model, x, y)
    found["outputs"] = {name: part.tolist() for name, part in model.predict(x, batch_size=25, verbose=0).items()}
    return found


# Arguments of fit.


@case
def validation_split():
    return fitted(mlp(), validation_split=0.2)


@case
def class_weight():
    return fitted(mlp(), class_weight={digit: 1.0 + digit / 5 for digit in range(10)})


@case
def sample_weight():
    return fitted(mlp(weighted_metrics=["accuracy"]), sample_weight=np.linspace(0, 2, 203))


@case
def steps_per_epoch():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(30)
    return fitted(mlp(), data.repeat(), None, batch_size=None, steps_per_epoch=3)


@spread
def steps_per_execution():
    return fitted(mlp(steps_per_execution=3), validation_data=(X[:50], Y[:50]))


@case
def initial_epoch():
    return fitted(mlp(), initial_epoch=1, epochs=3)


@case
def train_on_batch():
    model = mlp()
    own = slice(strategy.rank, 40, strategy.size)  # every rank brings its own part
    logs = [model.train_on_batch(X[own], Y[own], return_dict=True) for _ in range(2)]
    return {**numbers(model), "logs": logs}


@case
def run_eagerly():
    return fitted(mlp(run_eagerly=True), X[:70], Y[:70], epochs=1)


@case
def sum_reduction():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return fitted(mlp(lambda: keras.optimizers.SGD(1e-4), loss=loss))


@case
def regularization():
    layer = keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.05))
    return fitted(mlp(layers=[layer]))


# Optimizers.

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {},
    "Adafactor": {},
    "Nadam": {},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 1e-3},
    "Lamb": {},
    "Muon": {"exclude_layers": ["dense_out"]},
}


def optimizer_case(name, settings):
    def run():
        return fitted(mlp(lambda: getattr(keras.optimizers, name)(**settings)), X[:75], Y[:75], epochs=2)

    run.__name__ = f"optimizer_{name}"
    (spread if name in ("SGD", "Adam") else case)(run)


for name, settings in OPTIMIZERS.items():
    if hasattr(keras.optimizers, name):
        optimizer_case(name, settings)


@case
def clipping_that_does_nothing():
    return fitted(mlp(lambda: keras.optimizers.SGD(0.1, clipnorm=1e6)))


@case
def clipping():
    # Keras clips before the sum: not what one process does, but alike on all ranks.
    model = mlp(lambda: keras.optimizers.SGD(0.1, global_clipnorm=1e-3))
    before = numbers(model)["weights"]
    model.fit(X, Y, batch_size=32, epochs=1, shuffle=False, verbose=0)
    after = numbers(model)["weights"]
    moved = max(np.abs(np.subtract(a, b)).max() for a, b in zip(after, before, strict=True))
    assert 0 < moved < 0.1 * 7 * 1e-3 * strategy.num_replicas_in_sync, moved
    return {"ranks_only": after}


@case
def weight_decay_and_ema():
    def optimizer():
        return keras.optimizers.Adam(weight_decay=0.02, use_ema=True, ema_overwrite_frequency=3)

    return fitted(mlp(optimizer))


@case
def gradient_accumulation():
    return fitted(mlp(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)), X[:192], Y[:192])


@case
def learning_rate_schedule():
    return fitted(mlp(lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))))


@case
def loss_scale_optimizer():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    return fitted(mlp(optimizer))


class InfiniteOnOneRank(keras.layers.Layer):
    """Makes one sample's gradient infinite: one rank has it, all must skip the step."""

    def call(self, inputs):
        return inputs * tf.where(inputs[:, :1] > 1e6, inputs.dtype.max, 1.0)


@case
def an_infinity_on_one_rank():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), InfiniteOnOneRank(), keras.layers.Dense(10)])
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    poisoned = X.copy()
    poisoned[40, 0] = 1e7  # in the second batch, on the first rank
    model.fit(poisoned[:96], Y[:96], batch_size=32, epochs=1, shuffle=False, verbose=0)
    scale = float(model.optimizer.dynamic_scale.numpy())
    return {**numbers(model), "scale": scale, "steps": int(model.optimizer.step_counter.numpy())}


# Layers.


@spread
def embedding():
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((6,), dtype="int32"), keras.layers.Embedding(1000, 4), keras.layers.Flatten(),
             keras.layers.Dense(10)]
        )  # fmt: skip
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    words = (np.arange(203 * 6).reshape(203, 6) * 37) % 1000
    return fitted(model, words, Y)


@case
def sparse_gradients_stay_sparse():
    words, width = 50_000, 8
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((6,), dtype="int32"),
                keras.layers.Embedding(words, width),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = strategy.communication()["bytes"]
    found = fitted(model, (np.arange(64 * 6).reshape(64, 6) * 37) % words, Y[:64])
    sent = strategy.communication()["bytes"] - before
    assert sent < words * width * 8 / 4, f"four steps sent {sent} bytes; one dense gradient is {words * width * 8}"
    found["weights"] = found["weights"][1:]
    return found


@case
def embedding_where_dense_is_cheaper():
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((16,), dtype="int32"), keras.layers.Embedding(5, 4), keras.layers.Flatten(),
             keras.layers.Dense(10)]
        )  # fmt: skip
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, (X[:, :16] * 4).astype("int32"), Y)


@case
def frozen_layer_and_no_gradient():
    with strategy.scope():
        inputs = keras.Input((64,))
        frozen = keras.layers.Dense(8, activation="tanh", trainable=False)
        unused = keras.layers.Dense(3)
        hidden = frozen(inputs)
        unused(hidden)
        model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
        model.unused = unused
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model)


@spread
def synchronized_batch_normalization():
    return fitted(mlp(layers=[keras.layers.BatchNormalization(synchronized=True)]), X[:192], Y[:192])


@case
def batch_normalization_is_equal_on_all_ranks():
    model = mlp(layers=[keras.layers.BatchNormalization()])
    history = model.fit(
        X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_data=(X[:40], Y[:40])
    ).history
    assert np.isfinite(history["val_loss"]).all(), history
    return {"ranks_only": numbers(model)["weights"], "ranks_only_history": history}


@case
def batch_normalization_without_samples():
    model = mlp(layers=[keras.layers.BatchNormalization()])
    history = model.fit(X[:33], Y[:33], batch_size=32, epochs=1, shuffle=False, verbose=0).history
    weights = numbers(model)["weights"]
    assert all(np.isfinite(weight).all() for weight in weights), "a rank without samples spoilt the weights"
    return {"ranks_only": weights, "ranks_only_history": history}


@case
def convolution_and_recurrence():
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D(),
             keras.layers.Reshape((9, 4)), keras.layers.LSTM(5), keras.layers.Dense(10)]
        )  # fmt: skip
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, X[:75].reshape(-1, 8, 8, 1), Y[:75])


@case
def dropout_differs_between_replicas_and_weights_do_not():
    keras.utils.set_random_seed(100 + strategy.rank)  # whatever the seeds
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(16), keras.layers.Dropout(0.5)])
        model.compile("sgd", "mse")
        dropout = keras.layers.Dropout(0.5, seed=3)
        dropout.build((1, 1000))

    @tf.function
    def masks():
        return strategy.run(lambda: dropout(tf.ones((1, 1000), "float64"), training=True))

    all_masks = strategy.gather(masks(), axis=0).numpy()
    replicas = strategy.num_replicas_in_sync
    assert all_masks.shape[0] == replicas
    assert len({mask.tobytes() for mask in all_masks}) == replicas, "two replicas drop the same units"
    return {"ranks_only": numbers(model)["weights"]}


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.seen.update_state(tf.reduce_mean(x, axis=-1))
        return {"seen": self.seen.result()}

    @property
    def metrics(self):
        return [self.seen]


@case
def own_train_step():
    with strategy.scope():
        model = OwnStep()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model)


@case
def stateful_metrics():
    with strategy.scope():
        metrics = [
            keras.metrics.SparseCategoricalAccuracy(name="a"),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="c"),
        ]
    model = mlp(metrics=metrics)
    found = fitted(model, validation_data=(X[:41], Y[:41]))
    with strategy.scope():
        binary = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(1, activation="sigmoid")])
        binary.compile("sgd", "binary_crossentropy", metrics=["AUC", "Precision", "F1Score"])
    found["binary"] = binary.fit(
        X, (Y % 2).reshape(-1, 1), batch_size=32, epochs=1, shuffle=False, verbose=0
    ).history  # fmt: skip
    return found


@case
def state_made_outside_of_the_scope():
    model = mlp(metrics=[keras.metrics.SparseCategoricalAccuracy(name="outside")])
    with pytest.raises(ValueError, match=r"created outside of strategy.scope\(\): outside"):
        model.fit(X, Y, verbose=0)
    return {}


# Hand-written loops and the strategy's own methods.


@spread
def hand_written_loop():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(48))

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.ops.sum(tf.keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
            loss = losses / 48
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    losses = [float(train(batch)) for batch in data]
    return {**numbers(model), "losses": losses}


@case
def datasets_from_function():
    def share(context):
        assert context.num_input_pipelines == strategy.size
        assert context.input_pipeline_id == strategy.rank
        batch = context.get_per_replica_batch_size(48)
        whole = tf.data.Dataset.range(60).shard(context.num_input_pipelines, context.input_pipeline_id)
        return whole.batch(batch)

    data = strategy.distribute_datasets_from_function(share)

    @tf.function
    def total(batch):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)

    return {"total": sum(int(total(batch)) for batch in data)}


@case
def shards_of_unequal_length():
    def share(context):
        # The first rank has most of the data, the last has none.
        ranges = {1: [(0, 60)], 2: [(0, 60), (60, 60)], 3: [(0, 40), (40, 60), (60, 60)]}[strategy.size]
        begin, end = ranges[context.input_pipeline_id]
        return tf.data.Dataset.from_tensor_slices((X[begin:end], Y[begin:end])).batch(10)

    model = mlp()
    data = strategy.distribute_datasets_from_function(share)
    history = model.fit(data, epochs=1, verbose=0).history
    # One process sees batches of 10 in turn; several see one of each at once. Only with one rank's data are they equal.
    if strategy.size == 3:
        return {"ranks_only": numbers(model)["weights"], "ranks_only_history": history}
    return {**numbers(model), "history": history}


@case
def reductions():
    rank, size = strategy.rank, strategy.size
    found = {}
    for dtype in ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "complex64", "complex128"):
        value = tf.cast(tf.constant([1.0, 2.0, 3.0]) * (rank + 1), dtype)
        eager = strategy.reduce("SUM", value, axis=None)
        in_graph = tf.function(lambda value=value: strategy.reduce("SUM", value, axis=None))()
        expected = tf.cast(tf.constant([1.0, 2.0, 3.0]) * sum(range(1, size + 1)), dtype)
        for got in (eager, in_graph):
            assert got.dtype == expected.dtype, (got, expected)
            assert bool(tf.reduce_all(got == expected)), (dtype, got, expected)
        found[dtype] = np.abs(np.asarray(tf.cast(eager, "complex128"))).tolist() if size == 1 else None
    mean = strategy.reduce("MEAN", tf.constant(float(rank)), axis=None)
    assert float(mean) == (size - 1) / 2, mean
    uneven = tf.range(rank + 1.0)
    assert float(strategy.reduce("SUM", uneven, axis=0)) == sum(sum(range(r + 1)) for r in range(size))
    along = strategy.reduce("MEAN", tf.ones([rank + 1, 2]), axis=0)
    assert along.numpy().tolist() == [1.0, 1.0], along
    return {}


@case
def gathering():
    rank, size = strategy.rank, strategy.size
    rows = tf.fill([rank + 1, 2], float(rank))
    expected = np.concatenate([np.full((r + 1, 2), float(r)) for r in range(size)])
    for gather in (lambda v, a: strategy.gather(v, a), tf.function(lambda v, a: strategy.gather(v, a))):
        assert gather(rows, 0).numpy().tolist() == expected.tolist()
        assert gather(tf.transpose(rows), 1).numpy().tolist() == expected.T.tolist()
    assert strategy.gather(tf.constant([rank % 2 == 0]), 0).numpy().tolist() == [r % 2 == 0 for r in range(size)]
    return {}


@spread
def all_reduce_and_its_gradient():
    replicas = strategy.num_replicas_in_sync

    def replica():
        context = tf.distribute.get_replica_context()
        x = tf.cast(context.replica_id_in_sync_group, tf.float64) + 1.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context.all_reduce("sum", x * x)
        return y, tape.gradient(y, x)

    expected = sum((r + 1.0) ** 2 for r in range(replicas))
    values, gradients = tf.function(lambda: strategy.run(replica))()
    for value in strategy.experimental_local_results(values):
        assert float(value) == expected
    local = strategy.experimental_local_results(gradients)
    for index, gradient in enumerate(local):
        # The gradient of a sum over all replicas is summed over all replicas: each has d(y)/d(y) = 1.
        own = strategy.rank * len(local) + index + 1.0
        assert float(gradient) == replicas * 2 * own, (gradient, own)

    def mean():
        return tf.distribute.get_replica_context().all_reduce("mean", {"a": tf.constant(2.0), "b": [tf.constant(3.0)]})

    result = strategy.run(mean)
    assert float(strategy.experimental_local_results(result["a"])[0]) == 2.0
    return {}


@case
def held_results_stay_intact():
    @tf.function
    def doubled(value):
        return strategy.reduce("SUM", value, axis=None)

    variable = tf.Variable([1.0, 2.0])
    first = doubled(variable.read_value())
    second = doubled(tf.constant([5.0, 5.0]))
    third = doubled(variable.read_value())
    assert first.numpy().tolist() == third.numpy().tolist() == [strategy.size * 1.0, strategy.size * 2.0]
    assert second.numpy().tolist() == [5.0 * strategy.size] * 2
    assert variable.numpy().tolist() == [1.0, 2.0], "the input was written"
    return {}


@case
def values_from_function():
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group))
    total = strategy.reduce("SUM", values, axis=None)
    assert int(total) == sum(range(strategy.num_replicas_in_sync))
    return {}


@case
def subclass_of_the_strategy_counts_samples():
    class Own(tfdist.AllReduceStrategy):
        pass

    own = Own(devices=["CPU:0"])
    with own.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, X[:33], Y[:33])


@case
def many_equal_tensors_eagerly():
    # More calls of one shape than there are tags for one key, each in several segments.
    values = [tf.fill([1 << 20], float(index)) for index in range(6)]
    sums = strategy.extended.bridge.all_reduce(values)
    for index, total in enumerate(sums):
        assert bool(tf.reduce_all(total == index * strategy.size)), index
    return {}


class MeanPenalty(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


@spread
def added_loss_that_is_undefined_without_samples():
    return fitted(mlp(layers=[MeanPenalty()]), X[:33], Y[:33])


@spread
def several_outputs_without_samples():
    with strategy.scope():
        inputs = keras.Input((64,))
        model = keras.Model(inputs, [keras.layers.Dense(3, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)])
        model.compile("sgd", ["mse", "mae"])
    return fitted(model, X[:33], [X[:33, :3], X[:33, 3:4]])


@case
def predict_on_batch_is_of_own_rows():
    model = mlp()
    own = model.predict_on_batch(X[: 5 + strategy.rank])
    assert own.shape == (5 + strategy.rank, 10)
    np.testing.assert_allclose(own, model(X[: 5 + strategy.rank]))
    return {}


@case
def non_trainable_weights_keep_infinities():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.BatchNormalization(), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mean = model.layers[0].moving_mean
    mean.assign(np.where(np.arange(64) == 3, -np.inf, np.arange(64) / 7))
    model.evaluate(X[:8], Y[:8], verbose=0)
    assert np.isneginf(mean.numpy()[3])
    np.testing.assert_array_equal(np.delete(mean.numpy(), 3), np.delete(np.arange(64) / 7, 3))
    return {}


# Lower precision.


@spread
def float32():
    return {"float32": fitted(mlp("sgd", layers=[keras.layers.Dense(8, dtype="float32")]))}


@case
def mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return {"low": fitted(mlp("sgd"))}
    finally:
        keras.config.set_dtype_policy("float64")


@case
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = mlp("sgd")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return {"low": fitted(model)}
    finally:
        keras.config.set_dtype_policy("float64")


@case
def mixed_float16_without_samples():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return {"low": fitted(mlp("sgd"), X[:33], Y[:33])}
    finally:
        keras.config.set_dtype_policy("float64")


def main():
    chosen = os.environ.get("TEST_CASES", "all")
    found = {}
    for name, function in CASES.items():
        if (chosen == "spread" and name not in SPREAD) or (
            chosen not in ("all", "spread") and name not in chosen.split(",")
        ):
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        tf.random.set_seed(None)
        print("CASE", name, flush=True)
        found[name] = function()
    with open(f"{sys.argv[1]}/{strategy.rank}.json", "w") as file:
        json.dump(found, file, default=np.ndarray.tolist)


keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
main()
