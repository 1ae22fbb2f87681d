"""Checks of optimizers, precision, and of state that micro-batches change."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from world import ROWS, Place, check, classes, crossentropy, made, network, trained, vectors

import tfdist


def of_optimizer(name, make):
    def run(place):
        return trained(place, made(place, network, make, "mse"), *vectors(), epochs=3)

    run.__name__ = name
    return run


OPTIMIZERS = {
    "clipped_by_all_and_decayed": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5), weight_decay=0.1, global_clipnorm=0.05
    ),
    "clipped_each_accumulated_and_averaged": lambda: keras.optimizers.SGD(
        0.1,
        0.9,
        clipnorm=0.05,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=5,
    ),
}
for name, make in OPTIMIZERS.items():
    check(2)(of_optimizer(name, make))


@check(2, schedule="zero_bubble")
def loss_scale_that_overflows(place):
    """A finite loss whose gradients, times the scale, are not: the step is left out on all processes."""

    def optimizer():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05, weight_decay=0.01)
        return keras.optimizers.LossScaleOptimizer(inner, 2.0**127)

    model = made(place, network, optimizer, "mse")
    x, y = vectors()
    results = trained(place, model, x, 10 * y)
    assert float(model.optimizer.dynamic_scale) < 2.0**127
    return results


def mixed(policy):
    def make():
        hidden = [layers.Dense(7, "tanh", dtype=policy) for _ in range(3)]
        outputs = [layers.Dense(3, dtype=policy), layers.Activation("linear", dtype="float32")]
        return keras.Sequential([keras.Input((6,)), *hidden, *outputs])

    return make


@check(2)
def bfloat16(place):
    results = trained(place, made(place, mixed("mixed_bfloat16"), "sgd", "mse"), *vectors())
    return {"low": {"history": results["history"]}}


@check(2, schedule="gpipe")
def float16(place):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    results = trained(place, made(place, mixed("mixed_float16"), optimizer, "mse"), *vectors())
    return {"low": {"history": results["history"]}}


class InMicroBatches(keras.Sequential):
    """Plain Keras's reference for state: each micro-batch begins with that before the step, and the mean remains."""

    parts = 4

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows = int(x.shape[0])
        ends = [(part + 1) * rows // self.parts for part in range(self.parts)]
        before = [weight.numpy() for weight in self.non_trainable_variables]
        sums = [np.zeros_like(weight) for weight in before]
        total, gradients, outputs = 0.0, None, []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            if begin == end:
                continue
            for variable, value in zip(self.non_trainable_variables, before, strict=True):
                if "seed" not in variable.path:
                    variable.assign(value)
            with tf.GradientTape() as tape:
                outputs.append(self(x[begin:end], training=True))
                loss = self.compute_loss(x[begin:end], y[begin:end], outputs[-1]) * ((end - begin) / rows)
            part_gradients = tape.gradient(loss, [weight.value for weight in self.trainable_variables])
            gradients = (
                part_gradients if gradients is None else [a + b for a, b in zip(gradients, part_gradients, strict=True)]
            )
            total += loss
            for place, variable in enumerate(self.non_trainable_variables):
                sums[place] = sums[place] + variable.numpy() * ((end - begin) / rows)
        for variable, value in zip(self.non_trainable_variables, sums, strict=True):
            if "seed" not in variable.path:
                variable.assign(value)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(total, sample_weight=rows)
        return self.compute_metrics(x, y, tf.concat(outputs, 0))


@check(2, schedule="1f1b", micro_batches=4)
def statistics_of_micro_batches(place):
    def make():
        hidden = [layers.BatchNormalization(momentum=0.6), layers.Dense(7), layers.BatchNormalization(momentum=0.6)]
        kind = InMicroBatches if place.strategy is None else keras.Sequential
        return kind([keras.Input((6,)), layers.Dense(7, "tanh"), *hidden, layers.Activation("relu"), layers.Dense(3)])

    model = made(place, make, "sgd", "mse", metrics=lambda: ["mae"])
    x, y = vectors()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


@check(2, schedule="1f1b", recompute=True)
def dropout_is_alike_in_all_schedules(place):
    if place.strategy is None:
        return {}

    def make():
        hidden = [layers.Dense(7), layers.Dropout(0.4), layers.Dense(7), layers.Dropout(0.4)]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])

    weights = []
    for strategy in (place.strategy, tfdist.PipelineStrategy(stages=2, micro_batches=2, schedule="gpipe")):
        keras.utils.set_random_seed(7)
        model = made(Place(place.folder, strategy), make, "sgd", "mse")
        model.fit(tf.data.Dataset.from_tensor_slices(vectors()).batch(8), verbose=0)
        weights.append(model.get_weights())
    for weight, other in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
    return {}


class Worst(keras.metrics.Metric):
    """The largest error."""

    def __init__(self):
        super().__init__(name="worst")
        self.worst = self.add_variable((), "zeros", name="worst")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.worst.assign(keras.ops.maximum(self.worst, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self):
        return 1.0 * self.worst


@check(2, schedule="gpipe")
def metrics(place):
    def make():
        hidden = [layers.Dense(7, "relu") for _ in range(3)]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1, activation="sigmoid")])

    def near(y_true, y_pred):
        return keras.ops.abs(y_true - y_pred) < 0.5

    def of_compile():
        return ["accuracy", keras.metrics.AUC(name="auc"), near, keras.metrics.F1Score(threshold=0.5), Worst()]

    x, y = classes()
    y = (y > 0).astype("float32").reshape(-1, 1)
    model = made(place, make, "sgd", "binary_crossentropy", of_compile, weighted_metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    options = {"sample_weight": np.linspace(0, 1, ROWS), "validation_data": data}
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options).history
    return {"history": history, "evaluated": model.evaluate(data, verbose=0)}


@check(2, cuts=["d2"])
def a_frozen_base(place):
    """The first process has nothing to train."""

    def make():
        model = network()
        for name in ("d0", "d1"):
            model.get_layer(name).trainable = False
        return model

    def optimizer():
        inner = keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.05, use_ema=True, ema_momentum=0.8)
        return keras.optimizers.LossScaleOptimizer(inner, 2.0**127)

    model = made(place, make, optimizer, crossentropy())
    first = trained(place, model, *classes())
    model.trainable = True
    with place.scope():
        model.compile("adam", crossentropy(), run_eagerly=place.strategy is None)
    return {"first": first, **trained(place, model, *classes())}


@check(2, cuts=["d2"])
def frozen_layers(place):
    def make():
        model = network()
        for name in ("d0", "last"):
            model.get_layer(name).trainable = False
        return model

    model = made(place, make, "adam", crossentropy())
    first = trained(place, model, *classes())
    for name, trains in (("last", True), ("d0", True), ("d1", False)):
        model.get_layer(name).trainable = trains
    with place.scope():
        model.compile("sgd", crossentropy(), run_eagerly=place.strategy is None)
    return {"first": first, **trained(place, model, *classes())}
