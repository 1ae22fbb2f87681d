"""Cases of losses: a share's own, so that the weighed mean of shares is the whole batch's."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from world import X, Y, batched, case, fitted, mlp, numbers, spread, strategy

import tfdist

WORDS = (np.arange(75 * 9).reshape(75, 9) * 7) % 20  # 0 is masked: how often differs between shares


def cross_entropy(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


@spread
def sum_reduction():
    return fitted(mlp(lambda: keras.optimizers.SGD(1e-4), loss=cross_entropy(reduction="sum")))


@spread
def no_reduction():
    return fitted(mlp(lambda: keras.optimizers.SGD(1e-4), loss=cross_entropy(reduction="none")))


@spread
def mean_by_sample_weights():
    model = mlp(loss=cross_entropy(reduction="mean_with_sample_weight"))
    return fitted(model, X, Y, np.linspace(0, 2, 203) ** 2)


def tagger(loss):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((9,), dtype="int32"),
                keras.layers.Embedding(20, 4, mask_zero=True),
                keras.layers.Dense(5, "tanh"),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


@spread
def mean_over_valid_steps():
    return fitted(tagger(cross_entropy()), WORDS, WORDS % 3)


@case
def mean_over_valid_steps_by_sample_weights():
    weights = np.linspace(0.5, 2, 75 * 9).reshape(75, 9)
    return fitted(tagger(cross_entropy()), WORDS, WORDS % 3, weights)


@case
def sum_over_valid_steps():
    return fitted(tagger(cross_entropy(reduction="sum")), WORDS, WORDS % 3)


@case
def regularization():
    layer = keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.05))
    return fitted(mlp(layers=[layer]))


class MeanPenalty(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.mean(inputs**2))
        return inputs


@spread
def added_mean():
    return fitted(mlp(layers=[MeanPenalty()]))


@spread
def added_mean_without_samples():
    return fitted(mlp(layers=[MeanPenalty()]), X[:33], Y[:33])


class OwnLoss(keras.Model):
    """As in the docstring of Keras's `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = ops.mean(ops.square(y_pred - ops.one_hot(y, 10, dtype=y_pred.dtype)))
        loss += ops.sum(ops.square(self.dense.kernel)) * 0.01
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self):
        self.loss_tracker.reset_state()

    @property
    def metrics(self):
        return [self.loss_tracker]


@spread
def own_compute_loss():
    with strategy.scope():
        model = OwnLoss()
        model.compile("sgd")
    return fitted(model, X[:192], Y[:192])


class ScalarLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_pred - ops.one_hot(ops.cast(y_true, "int32"), 10, dtype=y_pred.dtype)))


@spread
def a_loss_that_returns_a_scalar():
    return fitted(mlp(loss=ScalarLoss()))


@spread
def a_root_of_a_mean_is_of_the_share():
    # Not what one process has, but near it, and alike on all ranks.
    def loss(y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(y_pred - ops.one_hot(ops.cast(y_true, "int32"), 10, dtype=y_pred.dtype))))

    results = fitted(mlp(loss=loss))
    return {"ranks_only": results["weights"], "near": results["history"]["loss"]}


class OwnSum(keras.Model):
    """A step in the manner of TensorFlow's guides: a sum, divided by the global batch."""

    def __init__(self, average):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.average = average

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.average(tf.keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            loss += tf.nn.scale_regularization_loss(0.01 * tf.reduce_sum(self.dense.kernel**2))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def own_sum(average):
    with strategy.scope():
        model = OwnSum(average)
        model.compile("sgd", "mse")
    model.fit(batched(X[:75], Y[:75]), epochs=2, verbose=0)
    return numbers(model)


@spread
def compute_average_loss_in_fit():
    return own_sum(lambda losses: tf.nn.compute_average_loss(losses, global_batch_size=32))


@spread
def scale_summed_loss_in_fit():
    return own_sum(lambda losses: tfdist.scale_summed_loss(tf.reduce_sum(losses)) / 32)


@case
def several_outputs():
    with strategy.scope():
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        outputs = [keras.layers.Dense(10, name="digit")(hidden), keras.layers.Dense(1, name="parity")(hidden)]
        model = keras.Model(inputs, outputs)
        losses = [cross_entropy(), keras.losses.MeanAbsoluteError(reduction="sum")]
        model.compile("sgd", losses, loss_weights=[1.0, 0.01], metrics=[["accuracy"], ["mae"]])
    y = [Y, (Y % 2).reshape(-1, 1).astype("float64")]
    return fitted(model, X, y, validation_data=batched(X[:41], tuple(part[:41] for part in y)))
