"""What is attached to an optimizer gets the gradients of all ranks, before they are clipped."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist.strategies.keras import keras_noise


def doubled(seen):
    def added(gradients, variables):
        seen.append([variable.name for variable in variables])
        return [2 * gradient for gradient in gradients]

    return added


def updated(make, gradients, seen):
    optimizer, variables = make(), [keras.Variable(np.zeros(1, np.float32), name=f"v{number}") for number in range(2)]
    optimizer.build(variables)
    keras_noise.attach(optimizer, doubled(seen))
    for gradient in gradients:
        optimizer.apply([None, tf.constant([gradient])], variables)
    return variables[1].numpy().tolist()


def test_noise_is_added_before_clipping_and_after_accumulation():
    keras_noise.install()
    seen = []
    assert updated(lambda: keras.optimizers.SGD(1.0), [0.5, 0.5], seen) == [-2.0]
    assert updated(lambda: keras.optimizers.SGD(1.0, clipvalue=0.75), [0.5], seen) == [-0.75]
    assert seen == [["v1"]] * 3
    assert updated(lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), [0.5, 1.5], seen) == [-2.0]
    assert updated(lambda: keras.optimizers.SGD(1.0, loss_scale_factor=2.0), [1.0], seen) == [-1.0]


def test_noise_is_added_after_the_sum_over_ranks(ranks):
    """The noise is the innermost hook, whichever hook was installed first."""

    def work(strategy):
        seen = []
        with strategy.scope():
            optimizer, variable = keras.optimizers.SGD(1.0, clipvalue=5.0), keras.Variable(np.zeros(1, np.float32))
            optimizer.build([variable])

        def added(gradients, variables):
            seen.append(gradients[0])
            return [10 * gradient for gradient in gradients]

        keras_noise.attach(optimizer, added)
        strategy.run(lambda: optimizer.apply([tf.constant([strategy.rank + 1.0])], [variable]))
        return float(seen[0][0]), variable.numpy().tolist()

    assert on_ranks(ranks(2), work) == [(3.0, [-5.0])] * 2


def test_optimizers_without_noise_are_unchanged():
    keras_noise.install()
    variable = keras.Variable(np.zeros(1, np.float32))
    keras.optimizers.SGD(1.0).apply([tf.constant([1.0])], [variable])
    assert variable.numpy() == [-1.0]
