"""Cases of hand-written loops and of the strategy's own methods."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from world import X, Y, case, fitted, numbers, shared_mlp, spread, strategy

import tfdist


def model_data_and_step():
    """A model, batches for it of which the last is smaller, and a function that trains it on a batch."""
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

    return model, data, train


@spread
def hand_written_loop():
    model, data, train = model_data_and_step()
    losses = [float(train(batch)) for batch in data]
    return {**numbers(model), "losses": losses}


@case
def loop_over_a_dataset_in_a_function():
    model, data, train = model_data_and_step()

    @tf.function
    def epoch(data):
        total = tf.constant(0.0, tf.float64)
        for batch in data:
            total += tf.cast(train(batch), tf.float64)
        return total

    losses = [float(epoch(data)) for _ in range(2)]
    assert epoch.experimental_get_tracing_count() == 1
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

    model = shared_mlp()
    data = strategy.distribute_datasets_from_function(share)
    history = model.fit(data, epochs=1, verbose=0).history
    # One process sees batches of 10 in turn; several see one of each at once. Only with one rank's data are they equal.
    if strategy.size == 3:
        return {"ranks_only": numbers(model)["weights"], "ranks_only_history": history}
    return {**numbers(model), "history": history}


@case
def reductions():
    rank, size = strategy.rank, strategy.size
    for dtype in ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "complex64", "complex128"):
        value = tf.cast(tf.constant([1.0, 2.0, 3.0]) * (rank + 1), dtype)
        eager = strategy.reduce("SUM", value, axis=None)
        in_graph = tf.function(lambda value=value: strategy.reduce("SUM", value, axis=None))()
        expected = tf.cast(tf.constant([1.0, 2.0, 3.0]) * sum(range(1, size + 1)), dtype)
        for got in (eager, in_graph):
            assert got.dtype == expected.dtype, (got, expected)
            assert bool(tf.reduce_all(got == expected)), (dtype, got, expected)
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
        replica_value = strategy.rank * len(local) + index + 1.0
        assert float(gradient) == replicas * 2 * replica_value, (gradient, replica_value)

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

    subclassed = Own(devices=["CPU:0"])
    with subclassed.scope():
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


@spread
def several_outputs_without_samples():
    with strategy.scope():
        inputs = keras.Input((64,))
        model = keras.Model(inputs, [keras.layers.Dense(3, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)])
        model.compile("sgd", ["mse", "mae"])
    return fitted(model, X[:33], [X[:33, :3], X[:33, 3:4]])


@case
def predict_on_batch_is_of_own_rows():
    model = shared_mlp()
    predictions = model.predict_on_batch(X[: 5 + strategy.rank])
    assert predictions.shape == (5 + strategy.rank, 10)
    np.testing.assert_allclose(predictions, model(X[: 5 + strategy.rank]))
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


@case
def a_dataset_for_each_replica():
    options = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA, experimental_fetch_to_device=False
    )

    def dataset(context):
        assert context.num_input_pipelines == strategy.num_replicas_in_sync
        return tf.data.Dataset.from_tensors(tf.constant([context.input_pipeline_id + 1]))

    data = strategy.distribute_datasets_from_function(dataset, options)
    replicas = strategy.num_replicas_in_sync
    totals = [int(strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)) for batch in data]
    assert totals == [replicas * (replicas + 1) // 2], totals
    return {}


@spread
def a_sum_of_one_value():
    if len(strategy.extended.worker_devices) > 1:
        with pytest.raises(ValueError, match="one value for each of this process's 2 replicas"):
            strategy.reduce("SUM", 5.0, axis=None)
    else:
        assert float(strategy.reduce("SUM", 5.0, axis=None)) == 5.0 * strategy.size
    return {}


@case
def variables_made_in_a_function():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(48))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)) / 48
        optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))  # builds it

    train = tf.function(lambda batch: strategy.run(step, args=batch))
    for batch in data:
        train(batch)
    return numbers(model)


@case
def functions_of_the_users_that_reduce():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.weights)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)) / 48
        optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))

    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(48)):
        strategy.run(step, args=batch)

    @tf.function
    def gather():
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.fill([2, 3], context.replica_id_in_sync_group), axis=0)

    gathered = strategy.experimental_local_results(strategy.run(gather))[0].numpy()
    assert gathered[:, 0].tolist() == [place for place in range(strategy.size) for _ in range(2)]
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    return numbers(model)
