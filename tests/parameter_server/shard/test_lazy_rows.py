"""Lazy updates of a server against Keras, where all rows are named, and against their definition, where some are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.sweeps import some
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.store import Store

SHAPES = [(12, 3), (5,), (7, 2, 2), (6,)]
KINDS = ("sparse", "dense", "sparse", "sparse")
K = keras.optimizers
OPTIMIZERS = {
    "momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "decay": lambda: K.SGD(0.1, weight_decay=0.1),
    "adam": lambda: K.Adam(0.01, amsgrad=True),
    "adamw": lambda: K.AdamW(0.01, weight_decay=0.1, clipvalue=0.5),
    "adamax": lambda: K.Adamax(0.01),
    "nadam schedule": lambda: K.Nadam(K.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "rmsprop": lambda: K.RMSprop(0.01, momentum=0.5, centered=True),
    "adadelta": lambda: K.Adadelta(1.0),
    "ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: K.Lion(0.01),
}


def values():
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype("float32") for shape in SHAPES]


def store_of(optimizer, state=None, **options):
    held = [HeldRows(f"v{place}", 0, shape[0], shape[0], **options) for place, shape in enumerate(SHAPES)]
    return Store(held, state or TrainingState(values()), keras.saving.serialize_keras_object(optimizer), is_lazy=True)


def gradients(store, step, named, kinds=KINDS):
    """Returns gradients of the named rows, as far as a variable has them."""
    generator = np.random.default_rng(step)
    arrays = [generator.normal(size=shape).astype("float32") for shape in SHAPES]
    sparse = {}
    for place in (0, 2, 3):
        if kinds[place] == "sparse":
            indices = np.array([row for row in named if row < SHAPES[place][0]], np.int64)
            sparse[place] = arrays[place][indices], indices
    return PushedGradients(kinds, store.shapes.layout(kinds).vectors(arrays), sparse), arrays


@pytest.mark.parametrize(
    ("name", "decays"), some([*((name, True) for name in OPTIMIZERS), ("decay", False), ("adamw", False)], 4)
)
def test_lazy_update_of_all_rows_equals_keras(name, decays):
    store, optimizer = store_of(OPTIMIZERS[name](), decays=decays), OPTIMIZERS[name]()
    variables = [keras.Variable(value) for value in values()]
    if not decays:
        optimizer.exclude_from_weight_decay(var_list=variables)
    optimizer.build(variables)
    for step in range(4):
        kinds = KINDS if step != 2 else ("sparse", "none", "sparse", "sparse")
        given, arrays = gradients(store, step, np.random.default_rng(step).permutation(12), kinds)
        store.update(given)
        whole = [None if kind == "none" else tf.constant(array) for kind, array in zip(kinds, arrays, strict=True)]
        optimizer.apply(whole, variables)
    state = store.state()
    for actual, expected in zip(state.values, variables, strict=True):
        np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert store.iterations == int(state.scalars["iteration"]) == 4
    again = store_of(OPTIMIZERS[name](), state, decays=decays)
    for each_store in (store, again):
        each_store.update(gradients(each_store, 9, [3, 1])[0])
    for actual, expected in zip(again.state().arrays(), store.state().arrays(), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_rows_keep_their_values_and_slots(name):
    store = store_of(OPTIMIZERS[name]())
    store.update(gradients(store, 0, range(12))[0])
    before, edition = store.state(), store.edition
    for step in (1, 2):
        store.update(gradients(store, step, [4, 1])[0])
    after, rest = store.state(), [0, 2, 3, 5]
    for place in (0, 2, 3):
        assert after.values[place][rest].tobytes() == before.values[place][rest].tobytes()
        for slot, array in after.slots[place].items():
            assert array[rest].tobytes() == before.slots[place][slot][rest].tobytes(), slot
        for row in (1, 4):
            assert after.values[place][row].tobytes() != before.values[place][row].tobytes()
    newer = store.since(edition, (0, 2))
    assert newer.kinds == ("sparse", "dense", "sparse", "dense")
    for place in (0, 2):
        rows, indices = newer.sparse[place]
        assert indices.tolist() == [1, 4]
        assert rows.tobytes() == after.values[place][[1, 4]].tobytes()


def test_lazy_adam_equals_its_definition():
    """Moments decay in a row's own updates, and the bias is corrected by the number of all updates."""
    store = store_of(K.Adam(0.01))
    value, first, second = (values()[0].astype(float), *np.zeros((2, 12, 3)))
    generator = np.random.default_rng(3)
    for step in range(1, 6):
        indices = generator.integers(0, 12, 5)  # some of them twice
        rows = generator.normal(size=(5, 3)).astype("float32")
        kinds = ("sparse", "none", "none", "none")
        store.update(PushedGradients(kinds, [], {0: (rows, indices)}))
        sums = np.zeros((12, 3))
        np.add.at(sums, indices, rows)
        for row in set(indices.tolist()):
            first[row] = 0.9 * first[row] + 0.1 * sums[row]
            second[row] = 0.999 * second[row] + 0.001 * sums[row] ** 2
            rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            value[row] -= rate * first[row] / (np.sqrt(second[row]) + 1e-7)
    np.testing.assert_allclose(store.state().values[0], value, rtol=1e-4, atol=1e-6)
    assert store.iterations == 5


def test_learning_rates_are_the_chiefs():
    store = store_of(K.SGD(1.0, momentum=0.5))
    store.set_learning_rate(0.25)
    store.update(
        PushedGradients(("sparse", "none", "none", "none"), [], {0: (np.ones((1, 3), np.float32), np.array([2]))})
    )
    np.testing.assert_allclose(store.state().values[0][2], values()[0][2] - 0.25, rtol=1e-6)


def test_adagrad_with_repeated_rows_equals_keras():
    """Adagrad counts each occurrence of a row, as Keras does."""
    store, alone = store_of(K.Adagrad(0.1)), K.Adagrad(0.1)
    variable = keras.Variable(values()[0])
    alone.build([variable])
    rows, indices = np.ones((3, 3), np.float32), np.array([2, 2, 1])
    store.update(PushedGradients(("sparse", "none", "none", "none"), [], {0: (rows, indices)}))
    alone.apply([tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant(SHAPES[0]))], [variable])
    np.testing.assert_allclose(store.state().values[0], variable.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: K.Adam(clipnorm=1.0), r'sparse="lazy" .*\(use sparse="exact"\): Adam\(clipnorm=…\) cannot'),
        (lambda: K.SGD(0.1, use_ema=True), r"SGD\(use_ema=…\)"),
        (lambda: K.Adam(gradient_accumulation_steps=2), r"Adam\(gradient_accumulation_steps=…\)"),
        (lambda: K.Adafactor(), "Adafactor keeps state of shape"),
    ],
)
def test_optimizers_without_lazy_updates_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        store_of(make())
