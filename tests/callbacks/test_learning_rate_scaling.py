import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.callbacks import LearningRateScaling

X = np.ones((12, 2), np.float32)


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))


def rates(*callbacks, optimizer=None, data=None, batch=3, **how):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.7), "mse", run_eagerly=True)  # it would trace longer
    recorder = Rates()
    given = (X, X[:, :1]) if data is None else (data,)
    model.fit(
        *given, batch_size=None if data is not None else batch, verbose=0, callbacks=[*callbacks, recorder], **how
    )
    return recorder.rates


def test_linear_rule_step_by_step():
    """From the rate of one process to eight times as much, by the same amount in each of two epochs of four steps."""
    learning_rates = rates(LearningRateScaling(0.1, warmup_epochs=2, factor=8), epochs=3)
    np.testing.assert_allclose(learning_rates, [0.1 + 0.7 * step / 8 for step in range(8)] + [0.8] * 4, rtol=1e-6)


def test_square_root_rule_without_warm_up():
    np.testing.assert_allclose(rates(LearningRateScaling(0.1, "sqrt", 0, factor=9), epochs=2), [0.3] * 8, rtol=1e-6)


def test_warmup_can_last_half_an_epoch():
    learning_rates = rates(LearningRateScaling(1.0, warmup_epochs=0.5, factor=3), epochs=1)
    np.testing.assert_allclose(learning_rates, [1, 2, 3, 3], rtol=1e-6)


def test_other_callbacks_can_change_rate_after_warmup():
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch > 1 else rate)
    learning_rates = rates(LearningRateScaling(0.1, warmup_epochs=1, factor=2), halved, epochs=4)
    np.testing.assert_allclose(learning_rates[4:], [0.2] * 4 + [0.1] * 4 + [0.05] * 4, rtol=1e-6)


def test_initial_epoch_continues_warmup_or_keeps_rate():
    """In the warm-up where it was; after it with the rate that it has."""
    learning_rates = rates(LearningRateScaling(0.1, warmup_epochs=2, factor=8), epochs=2, initial_epoch=1)
    np.testing.assert_allclose(learning_rates, [0.1 + 0.7 * step / 8 for step in range(4, 8)], rtol=1e-6)
    learning_rates = rates(LearningRateScaling(0.1, warmup_epochs=2, factor=8), epochs=3, initial_epoch=2)
    np.testing.assert_allclose(learning_rates, [0.7] * 4, rtol=1e-6)


def test_rate_inside_loss_scale_optimizer_is_scaled():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.7))
    np.testing.assert_allclose(
        rates(LearningRateScaling(0.1, warmup_epochs=0, factor=2), optimizer=optimizer), [0.2] * 4
    )


def test_the_factor_is_the_number_of_replicas():
    """Tests a strategy; `tests/multiprocess/test_distributed_optimizer.py` tests processes without a strategy."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        np.testing.assert_allclose(rates(LearningRateScaling(0.1, warmup_epochs=0), batch=6), [0.2] * 2, rtol=1e-6)


def test_unknown_epoch_length_needs_steps_per_epoch():
    def batches():
        for _ in range(4):
            yield X[:3], X[:3, :1]

    with pytest.raises(ValueError, match="needs steps_per_epoch"):
        rates(LearningRateScaling(0.1, factor=2), data=batches())
    learning_rates = rates(LearningRateScaling(0.1, warmup_epochs=1, factor=2, steps_per_epoch=4), data=batches())
    np.testing.assert_allclose(learning_rates, [0.1, 0.125, 0.15, 0.175], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, "must be one of linear, sqrt; got 'cubic'"),
        ({"warmup_epochs": -1}, "warmup_epochs of at least 0"),
        ({"factor": 0}, "positive learning_rate and factor"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningRateScaling(0.1, **arguments)


def test_optimizer_with_own_schedule_raises():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    for optimizer in (
        keras.optimizers.SGD(schedule),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule)),
    ):
        with pytest.raises(ValueError, match="its own schedule"):
            rates(LearningRateScaling(0.1, factor=2), optimizer=optimizer)
