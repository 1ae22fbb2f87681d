"""What is claimed of Keras's optimizers, by experiment on the Keras that is installed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.parameter_server.shard.row_local import keeps_other_rows, keeps_other_values

K = keras.optimizers
ROWS = 6
HALVED = K.schedules.ExponentialDecay(0.1, 1, 0.5)
OPTIMIZERS = {
    "sgd": K.SGD(0.1),
    "sgd clipvalue": K.SGD(0.1, clipvalue=0.1),
    "sgd clipnorm": K.SGD(0.1, clipnorm=0.1),
    "sgd global_clipnorm": K.SGD(0.1, global_clipnorm=0.1),
    "sgd ema": K.SGD(0.1, use_ema=True),
    "sgd ema overwrites": K.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "sgd decay": K.SGD(0.1, weight_decay=0.1),
    "sgd accumulation": K.SGD(0.1, gradient_accumulation_steps=2),
    "momentum": K.SGD(0.1, momentum=0.9),
    "adagrad": K.Adagrad(0.1),
    "adagrad clipvalue": K.Adagrad(0.1, clipvalue=0.1),
    "adagrad schedule": K.Adagrad(HALVED),
    "adadelta": K.Adadelta(1.0),
    "adadelta schedule": K.Adadelta(HALVED, clipvalue=0.1),
    "rmsprop": K.RMSprop(0.1),
    "rmsprop centered": K.RMSprop(HALVED, centered=True, clipnorm=0.5),
    "rmsprop momentum": K.RMSprop(0.1, momentum=0.5),
    "ftrl": K.Ftrl(0.1),
    "ftrl schedule": K.Ftrl(HALVED, l1_regularization_strength=0.1),
    "adam": K.Adam(0.1),
    "adamax": K.Adamax(0.1),
    "nadam": K.Nadam(0.1),
    "lion": K.Lion(0.1),
    "adamw": K.AdamW(0.1),
    "lamb": K.Lamb(0.1),
}
VALUES = {name for name in OPTIMIZERS if name.startswith(("sgd", "adagrad", "adadelta", "rmsprop"))} - {
    "sgd decay",
    "sgd accumulation",
    "sgd ema overwrites",
    "rmsprop momentum",
}
BOTH = {name for name in VALUES if name.startswith(("sgd", "adagrad"))} - {"sgd ema"}


def others_stay(optimizer):
    """Whether rows without a gradient keep their values, and their slots, in a few steps."""
    generator = np.random.default_rng(0)
    table = keras.Variable(generator.normal(size=(ROWS, 2)).astype("float32"))
    bias = keras.Variable(np.ones(3, "float32"))
    optimizer.build([table, bias])
    values, slots = [], []
    for indices in ([0, 1, 0], [2, 3, 3], [0, 4, 1], [1, 2, 1], [5, 5, 5]):
        kept = [table, *(variable for variable in optimizer.variables if tuple(variable.shape) == (ROWS, 2))]
        before = [variable.numpy() for variable in kept]
        rows = tf.constant(generator.normal(size=(3, 2)), tf.float32)
        optimizer.apply(
            [tf.IndexedSlices(rows, tf.constant(indices), tf.constant([ROWS, 2])), tf.ones(3)], [table, bias]
        )
        rest = [row for row in range(ROWS) if row not in indices]
        same = [
            was[rest].tobytes() == variable.numpy()[rest].tobytes() for was, variable in zip(before, kept, strict=True)
        ]
        values.append(same[0])
        slots.append(all(same[1:]))
    return all(values), all(slots)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_without_gradients_stay_only_with_listed_optimizers(name):
    optimizer = OPTIMIZERS[name]
    assert keeps_other_values(optimizer) == (name in VALUES)
    assert keeps_other_rows(optimizer) == (name in BOTH)
    values, slots = others_stay(optimizer)
    assert (values, values and slots) == (name in VALUES, name in BOTH)


def test_weight_decay_of_excluded_variables_changes_no_rows():
    assert keeps_other_rows(K.SGD(0.1, weight_decay=0.1), decays=False)
    assert not keeps_other_rows(K.SGD(0.1, weight_decay=0.1))


def test_user_defined_optimizer_may_change_all_rows():
    class Own(K.SGD):
        pass

    assert not keeps_other_values(Own(0.1))
