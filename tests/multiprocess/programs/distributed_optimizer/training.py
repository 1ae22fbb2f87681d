"""Training in `fit` and in loops, with optimizers and tapes."""

import os

import keras
import numpy as np
import tensorflow as tf
from world import STEPS, X, Y, assert_alike, assert_equal, fit, make_model, plain_model, rank, share, size

import tfdist


class Halved(keras.optimizers.SGD):
    """With an ``update_step`` of its own."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.multiply(gradient, learning_rate / 2))


def of_several():
    """An optimizer for biases and another one for kernels, which are asked for when it is built."""
    of_biases, of_others = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, clipnorm=0.1)
    return keras.optimizers.MultiOptimizer(lambda variable: of_biases if variable.path.endswith("bias") else of_others)


def ways():
    """Own optimizers, backward passes, and sums."""
    assert_equal(
        fit(make_model(tfdist.DistributedOptimizer(Halved(0.1))), share(X), share(Y)),
        fit(plain_model(Halved(0.1)), X, Y),
    )
    accumulating = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
    passes = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=3)
    assert_equal(fit(make_model(passes), share(X), share(Y)), fit(plain_model(accumulating), X, Y))
    sums = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1 / size), average=False))
    assert_equal(fit(sums, share(X), share(Y)), fit(plain_model(keras.optimizers.SGD(0.1)), X, Y))
    if os.environ.get("TEST_SWEEP"):
        further_ways()


def ranks():
    """One rank's data do not tell their shapes, or one has made its optimizer's variables, as if restored."""
    wanted = fit(plain_model(keras.optimizers.SGD(0.1, momentum=0.9)), X, Y)
    for unknown, built, metrics in ((0, None, ["accuracy"]), (None, 0, None)):
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        model = make_model(optimizer, metrics=metrics)
        if rank == built:
            optimizer.build(model.trainable_variables)
        x, y = (rows.reshape(STEPS, -1, *rows.shape[1:]) for rows in (share(X), share(Y)))
        shape = [None, None if rank == unknown else 4]
        signature = tf.TensorSpec(shape, x.dtype), tf.TensorSpec([None], y.dtype)
        data = tf.data.Dataset.from_generator(lambda x=x, y=y: zip(x, y, strict=True), output_signature=signature)
        model.fit(data.apply(tf.data.experimental.assert_cardinality(STEPS)), epochs=2, verbose=0)
        assert_equal(model, wanted)
        assert_alike(model)


def further_ways():
    """Schedules, eager steps, several in a call, a rate that a callback sets, and several optimizers."""
    rates = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    scheduled = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(rates)))
    assert_equal(fit(scheduled, share(X), share(Y)), fit(make_model(keras.optimizers.SGD(rates)), X, Y))
    eager = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), run_eagerly=True)
    assert_equal(fit(eager, share(X), share(Y)), fit(make_model(keras.optimizers.Adam(0.1)), X, Y))
    several = make_model(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), steps_per_execution=3)
    assert_equal(fit(several, share(X), share(Y)), fit(make_model(keras.optimizers.Adam(0.1)), X, Y))
    rate = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.3 / (epoch + 1))]
    called = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    expected = fit(plain_model(keras.optimizers.SGD(0.1)), X, Y, callbacks=rate)
    assert_equal(fit(called, share(X), share(Y), callbacks=rate), expected)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        model = make_model(tfdist.DistributedOptimizer(of_several()))
        assert_equal(fit(model, share(X), share(Y)), fit(make_model(of_several()), X, Y))


def looped(model, optimizer, x, y, wrap):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for part_x, part_y in zip(np.split(x, STEPS), np.split(y, STEPS), strict=True):
        step(part_x, part_y)
    return model


def loops():
    """A tape that averages, and an optimizer that does, in loops; the same with variables of one's own."""
    model = make_model(keras.optimizers.SGD())
    expected = looped(model, keras.optimizers.Adam(0.1), X, Y, lambda tape: tape)
    for optimizer, wrap in (
        (keras.optimizers.Adam(0.1), tfdist.DistributedGradientTape),
        (tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)), lambda tape: tape),
    ):
        model = make_model(keras.optimizers.SGD())
        assert_equal(looped(model, optimizer, share(X), share(Y), wrap), expected)
    local_source, common = tf.Variable([1.0]), tf.Variable([2.0])
    with tfdist.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(local_source * (rank + 1.0) + common * (rank + 1.0))
    tape.register_local_source(local_source)
    gradients = tape.gradient(loss, {"local": local_source, "common": common, "none": tf.Variable([0.0])})
    np.testing.assert_allclose(gradients["local"], [(rank + 1) / size])
    np.testing.assert_allclose(gradients["common"], [(size + 1) / 2])
    assert gradients["none"] is None
