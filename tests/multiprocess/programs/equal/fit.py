"""Cases of `fit`, `evaluate` and `predict`: the data they take, and their arguments."""

import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from world import (
    X,
    Y,
    batched,
    case,
    fitted,
    fitted_on_arrays,
    mlp,
    numbers,
    shared_mlp,
    spread,
    strategy,
    trained,
)


@spread
def arrays_with_a_partial_batch():
    return fitted_on_arrays(shared_mlp(), validation_data=(X[:50], Y[:50]))


@spread
def a_last_batch_of_one():
    return fitted_on_arrays(shared_mlp(), X[:33], Y[:33])


@spread
def fewer_samples_than_workers():
    return fitted_on_arrays(shared_mlp(), X[:1], Y[:1])


@spread
def batch_not_divisible():
    return fitted_on_arrays(shared_mlp(), batch_size=7)


@spread
def dataset():
    return trained(shared_mlp(), batched(X, Y, size=30))


@case
def infinite_dataset():
    return trained(shared_mlp(), batched(X, Y, size=30).repeat(), steps_per_epoch=9)


@spread
def evaluation():
    model = shared_mlp()
    return {"logs": model.evaluate(X, Y, batch_size=20, verbose=0, return_dict=True)}


@spread
def prediction():
    model = shared_mlp()
    return {"outputs": model.predict(X, batch_size=25, verbose=0).tolist()}


@case
def prediction_in_larger_executions():
    model = mlp(steps_per_execution=3)
    return {"outputs": model.predict(X, batch_size=25, verbose=0).tolist()}


@case
def a_metric_that_one_rank_resets():
    """The metric belongs to no model; rank 0 alone resets it after each step, also after the last of an epoch."""
    model = shared_mlp()
    with strategy.scope():
        metric = keras.metrics.Sum()
    reset = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: metric.reset_state())
    return fitted(model, callbacks=[reset] if strategy.rank == 0 else [])


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        part = slice(index * 31, (index + 1) * 31)
        return X[part], Y[part]


@case
def pydataset():
    return trained(shared_mlp(), Batches())


@case
def pydataset_shuffled_with_a_seed_on_one_rank_only():
    # The order is the chief's; what it is depends on nothing that one process could repeat, so compare ranks only.
    model = shared_mlp()
    model.fit(Batches(), epochs=2, shuffle=True, verbose=0)
    return {"ranks_only": numbers(model)["weights"]}


@case
def arrays_shuffled_without_a_seed():
    model = shared_mlp()
    seen = model.fit(X, np.arange(203) % 10, batch_size=203, epochs=1, shuffle=True, verbose=0).history
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=True, verbose=0)
    return {"history": seen, "ranks_only": numbers(model)["weights"]}


@case
def arrays_shuffled_with_a_seed():
    model = shared_mlp()
    keras.utils.set_random_seed(5)
    results = fitted_on_arrays(model, shuffle=True)
    tf.random.set_seed(None)
    return results


@case
def generator():
    def batches():
        while True:
            for index in range(7):
                yield X[index * 31 : (index + 1) * 31], Y[index * 31 : (index + 1) * 31]

    return trained(shared_mlp(), batches(), steps_per_epoch=7)


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
    results = fitted(model, x, y)
    results["outputs"] = {name: part.tolist() for name, part in model.predict(x, batch_size=25, verbose=0).items()}
    return results


@case
def validation_split():
    return fitted_on_arrays(shared_mlp(), validation_split=0.2)


@case
def class_weight():
    return fitted(shared_mlp(), class_weight={digit: 1.0 + digit / 5 for digit in range(10)})


@case
def sample_weight():
    return fitted_on_arrays(mlp(weighted_metrics=["accuracy"]), sample_weight=np.linspace(0, 2, 203))


@case
def steps_per_epoch():
    return trained(shared_mlp(), batched(X, Y, size=30).repeat(), steps_per_epoch=3)


@spread
def steps_per_execution():
    return fitted_on_arrays(mlp(metrics=["accuracy"], steps_per_execution=3), validation_data=(X[:50], Y[:50]))


@case
def initial_epoch():
    return fitted(shared_mlp(), initial_epoch=1, epochs=3)


@case
def train_on_batch():
    model = shared_mlp()
    rows = slice(strategy.rank, 40, strategy.size)  # every rank brings its own part
    logs = [model.train_on_batch(X[rows], Y[rows], return_dict=True) for _ in range(2)]
    return {**numbers(model), "logs": logs}


@case
def run_eagerly():
    return fitted(mlp(metrics=["accuracy"], run_eagerly=True), X[:70], Y[:70], epochs=1)


@spread
def data_without_shapes_on_one_rank():
    """As from a generator: its first batches tell which dimensions vary. This rank alone draws one to build from."""

    def batches():
        for row in range(0, 90, 30):
            yield X[row : row + 30], Y[row : row + 30]

    shape = [None, None] if strategy.rank == 0 else [None, 64]
    signature = tf.TensorSpec(shape, "float64"), tf.TensorSpec([None], "int64")
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return trained(mlp("adam", metrics=["accuracy"]), data)


@case
def prediction_over_files():
    folder = Path(tempfile.mkdtemp())  # each rank has files of its own, which are alike
    for number in range(4):
        (folder / f"{number}.txt").write_text("\n".join(str(number * 10 + line) for line in range(10)))
    lines = tf.data.TextLineDataset([str(folder / f"{number}.txt") for number in range(4)])
    data = lines.map(lambda line: tf.fill([64], tf.strings.to_number(line, tf.float64))).batch(6)
    results = {"outputs": shared_mlp().predict(data, verbose=0).tolist()}
    shutil.rmtree(folder)
    return results


@spread
def strings_out_of_predict():
    with strategy.scope():
        inputs = keras.Input((1,), dtype="string")
        upper = keras.layers.Lambda(tf.strings.upper, output_shape=(1,), dtype="string")
        model = keras.Model(inputs, upper(inputs))
    words = model.predict(tf.constant([["a"], ["bc"], [""], ["def"], ["g"]]), batch_size=2, verbose=0)
    assert words.tolist() == [[b"A"], [b"BC"], [b""], [b"DEF"], [b"G"]], words
    return {}


@case
def distributed_dataset():
    """With a last batch of one row, in `fit`, validation and `evaluate`."""
    data = strategy.experimental_distribute_dataset(batched(X[:97], Y[:97]))
    model = shared_mlp()
    results = trained(model, data, validation_data=data)
    return {**results, "evaluated": model.evaluate(data, verbose=0)}


@case
def ragged_and_sparse_batches():
    rows = tf.ragged.constant([[1.0] * (1 + index % 5) for index in range(33)], dtype=tf.float64)
    dense = tf.constant(X[:33] * (X[:33] > 0.5))
    data = tf.data.Dataset.from_tensor_slices((rows, tf.sparse.from_dense(dense))).batch(32)
    total = 0.0
    for ragged, sparse in strategy.experimental_distribute_dataset(data):
        share = strategy.run(lambda r, s: tf.reduce_sum(r) + tf.sparse.reduce_sum(s), args=(ragged, sparse))
        total += float(strategy.reduce("SUM", share, axis=None))
    return {"total": total}
