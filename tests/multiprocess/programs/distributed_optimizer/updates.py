"""Gradients of fixed values: every optimizer of Keras against one that gets the mean, and noise."""

import itertools
import os

import keras
import numpy as np
import tensorflow as tf
from world import STEPS, WORDS, generator, rank, size

import tfdist

OPTIMIZERS = {
    name: entry
    for name, entry in sorted(vars(keras.optimizers).items())
    if isinstance(entry, type)
    and issubclass(entry, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
}
OPTIMIZERS["LARS"] = tfdist.optimizers.LARS
if not os.environ.get("TEST_SWEEP"):
    # The others update each weight by its gradient alone, as Adam and SGD do.
    OPTIMIZERS = {
        name: OPTIMIZERS[name] for name in sorted({*OPTIMIZERS} & {*"Adafactor Adam LARS Lamb Muon SGD".split()})
    }
SETTINGS = [
    {},
    {"clipnorm": 0.05, "weight_decay": 0.01},
    {"global_clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    {"clipvalue": 0.01, "gradient_accumulation_steps": 2},
]


def applied(optimizer, steps, in_graph=True):
    """The variables after an optimizer has applied the gradients of some steps.

    In a graph; or, for a reference, eagerly, as tracing would take longer than these steps.
    """
    variables = [keras.Variable(tensor, name=f"kernel_{place}") for place, tensor in enumerate(BEGINNING)]

    def step(gradients):
        optimizer.apply(gradients, variables)

    if in_graph:
        step = tf.function(step, autograph=False, reduce_retracing=True)
    optimizer.build(variables)
    for gradients in steps:
        step(gradients)
    return [tensor.numpy() for tensor in (*variables, *optimizer.variables)]


BEGINNING = [generator.normal(size=shape) for shape in ((WORDS, 5), (20, 6), (6,))]
OWN = [
    [[generator.normal(size=entry.shape) for entry in BEGINNING] for _ in range(2 * STEPS)] for _ in range(size)
]  # of each rank, in each step
ROWS = generator.integers(0, WORDS, (2 * STEPS, size, WORDS))


def sparse(values, rows):
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([WORDS, 5], tf.int64))


def of_whole(number):
    """The gradients of a step that one process would have; the rows of all, in the order of the ranks."""
    table = np.concatenate([rank_gradients[number][0] for rank_gradients in OWN]) / size
    dense = [
        tf.constant(np.mean([rank_gradients[number][place] for rank_gradients in OWN], axis=0)) for place in (1, 2)
    ]
    return [sparse(table, ROWS[number].reshape(-1)), *dense]


def of_this(number):
    table, *dense = OWN[rank][number]
    return [sparse(table, ROWS[number, rank]), *map(tf.constant, dense)]


def equal():
    """Optimizers of Keras, as they are by default, and with each kind of settings that they take.

    A quarter of the combinations, in which each optimizer and each kind of settings occurs; in sweeps, all.
    """
    cases = [
        (name, kind, settings)
        for row, (name, kind) in enumerate(OPTIMIZERS.items())
        for column, settings in enumerate(SETTINGS)
        if os.environ.get("TEST_SWEEP") or (row + column) % 4 == 2
    ]
    for name, kind, settings in cases:
        try:
            plain, wrapped = (kind(learning_rate=0.05, **settings) for _ in range(2))
        except ValueError:  # some take no weight decay, or no moving average
            continue
        expected = applied(plain, map(of_whole, range(2 * STEPS)), in_graph=False)
        actual = applied(tfdist.DistributedOptimizer(wrapped), map(of_this, range(2 * STEPS)))
        for place, (value, other) in enumerate(zip(actual, expected, strict=True)):
            if "gradient_accumulation_steps" in settings and place >= len(BEGINNING):
                continue  # what has been accumulated is a process's own
            limit = 1e-7 * np.abs(other).max()
            np.testing.assert_allclose(value, other, rtol=0, atol=limit, err_msg=f"{name} {settings} {place}")
        everyone = tfdist.all_gather(tf.constant(np.concatenate([value.ravel() for value in actual[:3]])[None])).numpy()
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0)), (name, settings)


def drawn(place, update, process):
    """The noise of a rank."""
    folded = tf.constant([0, place], tf.int64)
    for part in (update, process):
        folded = tf.random.experimental.stateless_fold_in(folded, tf.constant(part, tf.int64))
    return tf.random.stateless_normal(BEGINNING[place].shape, folded, dtype=tf.float64, alg="philox").numpy()


def whole_table(number, process):
    """A rank's gradient of the table, which is sparse."""
    return tf.convert_to_tensor(sparse(OWN[process][number][0], ROWS[number, process])).numpy()


def noisy():
    """Each rank adds noise by the variance of its own parts, or all the same noise to the mean; the bits are equal."""
    noise, wrap = tfdist.optimizers.GradientNoise, tfdist.DistributedOptimizer

    def inner(**settings):
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, **settings)

    expected = [value.copy() for value in BEGINNING]
    isotropic = [value.copy() for value in BEGINNING]
    for update, place in itertools.product(range(STEPS), range(len(BEGINNING))):
        means = []
        for process in range(size):
            numbers = (2 * update, 2 * update + 1)
            parts = np.stack(
                [OWN[process][number][place] if place else whole_table(number, process) for number in numbers]
            )
            means.append(parts.mean(axis=0))
            deviation = np.sqrt(7 * parts.var(axis=0, ddof=1) / 2)
            expected[place] -= (means[-1] + deviation * drawn(place, update, process)) / size
        isotropic[place] -= np.clip(np.mean(means, axis=0) + 0.5 * drawn(place, update, 0), -0.2, 0.2)
    equal = {"structure": "isotropic", "stddev": 0.5}
    for made, wanted in (
        (wrap(noise(inner(), 8)), expected),
        (noise(wrap(inner()), 8), expected),
        (wrap(noise(keras.optimizers.SGD(1.0), 8), backward_passes_per_step=2), expected),
        (wrap(noise(inner(clipvalue=0.2), **equal)), isotropic),
        (noise(wrap(inner(clipvalue=0.2)), **equal), isotropic),
    ):
        actual = applied(made, map(of_this, range(2 * STEPS)))[: len(BEGINNING)]
        for value, other in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)
        everyone = tfdist.all_gather(tf.constant(np.concatenate([value.ravel() for value in actual])[None])).numpy()
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0))
