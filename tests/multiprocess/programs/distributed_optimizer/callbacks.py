"""Callbacks of tfdist in `fit`."""

import contextlib
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from world import X, Y, assert_alike, assert_equal, fit, make_model, plain_model, rank, share, size

import tfdist


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
    plain = plain_model(keras.optimizers.SGD(0.1, **steps))
    fit(plain, X, Y)
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, **steps)))
    fit(model, share(X), share(Y), callbacks=[tfdist.callbacks.BroadcastVariables(size - 1)])
    for weight, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-9)
    for begins in ([], [tfdist.callbacks.BroadcastVariables(size - 1)]):
        model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), run_eagerly=True)
        model.optimizer.register_local_var(model.trainable_variables[-1])
        fit(model, share(X), share(Y), callbacks=begins)
        bias = model.trainable_variables[-1].numpy()
        if not begins:
            without = bias
    np.testing.assert_array_equal(bias, without)


def callbacks():
    """Weights from the root, averages of logs, one decision, and the rate of the whole batch."""
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), metrics=["accuracy"])
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
    validation = tf.data.Dataset.from_tensors((share(X)[rank:], share(Y)[rank:]))
    fit(model, share(X), share(Y), callbacks=given, validation_data=validation)
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
            fit(other, share(X), share(Y), epochs=1)
        assert len([record for record in messages if "begin to train with different weights" in record]) == told, (
            messages
        )
    layers = [keras.layers.Input((4,)), keras.layers.BatchNormalization(synchronized=True)]
    other = keras.Sequential(layers)
    other.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
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
    expected = fit(plain_model(keras.optimizers.SGD(0.1)), X, Y, callbacks=[Halves()])
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert_equal(fit(model, share(X), share(Y), callbacks=[Halves()]), expected)
    assert_alike(model)
