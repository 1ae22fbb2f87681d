"""Cases of layers, metrics and custom steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from world import X, Y, batched, case, fitted, fitted_on_arrays, mlp, numbers, spread, strategy


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
    results = fitted(model, (np.arange(64 * 6).reshape(64, 6) * 37) % words, Y[:64])
    sent = strategy.communication()["bytes"] - before
    assert sent < words * width * 8 / 4, f"four steps sent {sent} bytes; one dense gradient is {words * width * 8}"
    results["weights"] = results["weights"][1:]
    return results


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
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return fitted(model)


@spread
def synchronized_batch_normalization():
    return fitted(mlp(layers=[keras.layers.BatchNormalization(synchronized=True)]), X[:192], Y[:192])


@case
def batch_normalization_is_equal_on_all_ranks():
    model = mlp(layers=[keras.layers.BatchNormalization()])
    data = {"x": batched(X, Y), "validation_data": batched(X[:40], Y[:40])}
    history = model.fit(**data, epochs=2, verbose=0).history
    assert np.isfinite(history["val_loss"]).all(), history
    return {"ranks_only": numbers(model)["weights"], "ranks_only_history": history}


@case
def batch_normalization_without_samples():
    model = mlp(layers=[keras.layers.BatchNormalization()])
    history = model.fit(batched(X[:33], Y[:33]), epochs=1, verbose=0).history
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


class StepOnLosses(OwnStep):
    """Gives the tape a loss for each sample, as in Keras's example of triplet losses, and returns what metrics give."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True) / 32
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(losses, variables), variables, strict=True))
        self.seen.update_state(losses)
        return {"seen": self.seen.result(), "exponential": tf.exp(self.seen.result())}


@case
def losses_of_samples_in_own_step():
    results = {}
    for rows in (44, 48):  # of the latter, the number of rows of each batch is static
        with strategy.scope():
            model = StepOnLosses()
            model.compile("sgd")
        results[f"{rows} rows"] = fitted_on_arrays(model, X[:rows], Y[:rows], batch_size=16)
    return results


@case
def stateful_metrics():
    with strategy.scope():
        metrics = [
            keras.metrics.SparseCategoricalAccuracy(name="a"),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="c"),
        ]
    model = mlp(metrics=metrics)
    results = fitted(model, validation_data=batched(X[:41], Y[:41]))
    with strategy.scope():
        binary = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(1, activation="sigmoid")])
        binary.compile("sgd", "binary_crossentropy", metrics=["AUC", "Precision", "F1Score"])
    results["binary"] = binary.evaluate(X, (Y % 2).reshape(-1, 1), batch_size=32, verbose=0)
    return results


@case
def state_made_outside_of_the_scope():
    model = mlp(metrics=[keras.metrics.SparseCategoricalAccuracy(name="outside")])
    with pytest.raises(ValueError, match=r"created outside of strategy.scope\(\): outside"):
        model.fit(X, Y, verbose=0)
    return {}


def small_table(optimizer):
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((6,), dtype="int32"), keras.layers.Embedding(50, 4), keras.layers.Flatten(),
             keras.layers.Dense(10)]
        )  # fmt: skip
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, (np.arange(203 * 6).reshape(203, 6) * 37) % 50, Y)


@case
def small_table_with_adamw():
    return small_table(keras.optimizers.AdamW)


@case
def small_table_with_rmsprop():
    return small_table(keras.optimizers.RMSprop)


@case
def small_table_with_adagrad_and_clipping():
    return small_table(lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.05))


@spread
def words_and_positions():
    # Every word counts by itself, as one process has it; positions are the same for all samples, and are summed.
    with strategy.scope():
        words = keras.Input((6,), dtype="int32")
        positions = keras.layers.Embedding(6, 4)
        hidden = keras.layers.Embedding(50, 4)(words) + positions(np.arange(6))
        model = keras.Model(words, keras.layers.Dense(10)(keras.layers.Flatten()(hidden)))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, (np.arange(203 * 6).reshape(203, 6) * 37) % 50, Y)


@spread
def columns_of_a_table():
    # Rows of all embeddings are summed together, those of small ones densely; one embedding has two columns.
    sizes = (5, 1000, 50, 2000)
    with strategy.scope():
        table = keras.Input((5,), dtype="int32")
        embeddings = [keras.layers.Embedding(size, 3 + place % 2) for place, size in enumerate(sizes)]
        columns = [embeddings[place % 4](table[:, place] % sizes[place % 4]) for place in range(5)]
        model = keras.Model(table, keras.layers.Dense(10)(keras.layers.Concatenate()(columns)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, (np.arange(203 * 5).reshape(203, 5) * 37) % 2000, Y)
