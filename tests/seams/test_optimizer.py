"""Hooks of plain optimizers of Keras, which note what they are given and change it."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.seams import optimizer

INNER, OUTER = "tfdist.strategies.keras.keras_noise", "tfdist.strategies.keras.keras_optimizers"


@pytest.fixture
def provided(monkeypatch):
    """Provides hooks for all optimizers, until the end of the test."""
    for name in ("provided", "kinds"):
        monkeypatch.setattr(optimizer.points, name, [])

    def provide(kind, module=INNER):
        kind.__module__ = module
        optimizer.points.provide([kind], lambda owner: [kind()])

    return provide


def applied(made, *gradients):
    """A variable that began as (0, 0), after updates."""
    variable = keras.Variable(np.zeros(2, np.float32), name="v")
    made.build([variable])
    for gradient in gradients:
        made.apply([tf.constant(gradient, tf.float32)], [variable])
    return variable.numpy().tolist()


def multiplying(factor, seen):
    class Hooks(optimizer.OptimizerHooks):
        def gradients(self, update, gradients):
            seen.append((factor, type(update.optimizer).__name__, [element.name for element in update.variables]))
            return [factor * element + 1 for element in gradients]

    return Hooks


def test_gradient_hooks_run_after_accumulation_and_before_clipping(provided):
    seen = []
    provided(multiplying(10, seen))
    provided(multiplying(2, seen), OUTER)
    assert applied(keras.optimizers.SGD(1.0), [1, 2]) == [-31, -51]
    assert seen == [(2, "SGD", ["v"]), (10, "SGD", ["v"])]
    assert applied(keras.optimizers.SGD(1.0, clipvalue=40.0), [1, 2]) == [-31, -40]
    assert applied(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), [1, 2], [3, 4]) == [-51, -71]
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    assert applied(scaled, [4, 8]) == [-31, -51]


def test_update_begins_before_accumulation_and_ends_after_use(provided):
    class Hooks(optimizer.OptimizerHooks):
        def begin(self, update, gradients):
            update.weight = 3.0
            assert optimizer.update_of(update.optimizer) is None
            return [2 * gradient for gradient in gradients]

        def gradients(self, update, gradients):
            assert optimizer.update_of(update.optimizer) is update
            assert optimizer.update_of(keras.optimizers.SGD()) is None
            assert not update.is_summed
            return [update.weight * gradient for gradient in gradients]

    provided(Hooks)
    made = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    assert applied(made, [1, 0], [3, 0]) == [-12, 0]
    assert optimizer.update_of(made) is None


def test_an_optimizer_within_others_is_not_the_outermost(provided):
    seen = []

    class Hooks(optimizer.OptimizerHooks):
        def apply(self, call):
            seen.append((type(call.optimizer).__name__, call.is_outermost, call.applies_itself))
            if call.applies_itself:
                call.arguments["grads"] = [2 * gradient for gradient in call.arguments["grads"]]

    provided(Hooks)
    assert applied(keras.optimizers.SGD(1.0), [1, 2]) == [-2, -4]
    assert seen == [("SGD", True, True)]
    seen.clear()
    applied(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), [1, 2])
    assert seen == [("LossScaleOptimizer", True, False), ("SGD", False, True)]
    with pytest.raises(ValueError, match=r".*"):
        keras.optimizers.SGD(1.0).apply([tf.constant(1.0)])  # which is not built
    seen.clear()
    applied(keras.optimizers.SGD(1.0), [1, 2])
    assert seen == [("SGD", True, True)], "also after an error"


def test_overwriting_hook_changes_only_overwriting_values(provided):
    class Hooks(optimizer.OptimizerHooks):
        def overwriting(self, variables, values):
            assert [element.name for element in variables] == ["range"]
            return [10 * element for element in values]

    provided(Hooks)
    variables = [keras.Variable(np.zeros(1, np.float32), name=name) for name in ("weight", "range")]
    variables[1].overwrite_with_gradient = True
    made = keras.optimizers.SGD(1.0)
    made.build(variables)
    made.apply([tf.constant([1.0]), tf.constant([2.0])], variables)
    assert [variable.numpy().tolist() for variable in variables] == [[-1.0], [20.0]]


def test_finite_hooks_run_from_innermost_to_outermost(provided):
    seen = []

    def telling(name, told):
        class Hooks(optimizer.OptimizerHooks):
            def finite(self, is_finite):
                seen.append((name, bool(is_finite)))
                return tf.constant(told)

        return Hooks

    provided(telling("inner", False))
    provided(telling("outer", True), OUTER)
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    assert made.check_finite([tf.constant(1.0)])
    rows = tf.IndexedSlices(tf.constant([[np.inf]]), tf.constant([7]), tf.constant([2**60, 1], tf.int64))
    assert made.check_finite([rows])
    assert seen == [("inner", True), ("outer", False), ("inner", False), ("outer", False)]


def test_within_update_carries_the_update_to_other_threads(provided):
    updates = []

    class Hooks(optimizer.OptimizerHooks):
        def gradients(self, update, gradients):
            def work():
                updates.append(optimizer.update_of(update.optimizer))

            for target in (work, optimizer.within_update(work)):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join()
            updates.append(update)
            return gradients

    provided(Hooks)
    applied(keras.optimizers.SGD(1.0), [1, 2])
    assert updates[0] is None
    assert updates[1] is updates[2]
