"""Updates of some rows against the same optimizer on a plain variable."""

import keras
import numpy as np
import pytest

from tfdist.parameter_server.shard import row_optimizer
from tfdist.parameter_server.shard.row_optimizer import RowOptimizer

optimizers = keras.optimizers
FLOAT32 = np.dtype(np.float32)
DIM = 3


def schedule():
    return optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


ROW_LOCAL = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD, momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "SGD, Nesterov, clipvalue": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.3),
    "SGD, schedule, decay": lambda: optimizers.SGD(schedule(), weight_decay=0.1),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam, amsgrad, schedule": lambda: optimizers.Adam(schedule(), amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "RMSprop, centered, momentum": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
    "Lion": lambda: optimizers.Lion(0.01),
}
WITHOUT_MEMORY_OF_ABSENCE = ["SGD", "Adagrad", "Ftrl"]
"""For which a gradient of zero changes nothing."""


class Rows:
    """A table of all keys, as the caller of `RowOptimizer` has it."""

    def __init__(self, optimizer, values, dtype=FLOAT32):
        self.optimizer = RowOptimizer(keras.optimizers.serialize(optimizer), values.shape[1], np.dtype(dtype))
        self.columns = [values.copy()]
        for initial, shape in zip(self.optimizer.initial, self.optimizer.slot_shapes, strict=True):
            slot = values.copy() if initial is None else np.full((len(values), *shape), initial, dtype)
            self.columns.append(slot)

    def update(self, slots, gradients):
        self.optimizer.update(self.columns, np.asarray(slots, np.int64), gradients)

    @property
    def values(self):
        return self.columns[0]


def noise(seed, rows, dim=DIM, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(dtype)


def plain(optimizer, values, gradients):
    """The values after steps on a dense variable."""
    variable = keras.Variable(values, dtype=values.dtype.name)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return variable.numpy()


@pytest.mark.parametrize("name", ROW_LOCAL)
def test_updates_of_all_rows_are_those_of_keras(name):
    values = noise(0, 9)
    gradients = [noise(step, 9) for step in range(1, 5)]
    rows = Rows(ROW_LOCAL[name](), values)
    generator = np.random.default_rng(0)
    for gradient in gradients:
        order = generator.permutation(9)
        rows.update(order, gradient[order])
    np.testing.assert_allclose(rows.values, plain(ROW_LOCAL[name](), values, gradients), rtol=2e-6, atol=1e-7)
    assert rows.optimizer.iterations == 4


@pytest.mark.parametrize("name", WITHOUT_MEMORY_OF_ABSENCE)
def test_rows_without_a_gradient_are_as_with_a_gradient_of_zero(name):
    values = noise(0, 6)
    if name == "Ftrl":  # which computes a row from its slots, and zero from new ones
        values[:] = 0
    rows, gradients = Rows(ROW_LOCAL[name](), values), []
    for step, slots in enumerate([[0, 1], [4, 1], [], [2, 0, 4], [1]]):
        gradient = np.zeros_like(values)
        gradient[slots] = noise(step + 1, len(slots))
        gradients.append(gradient)
        rows.update(slots, gradient[slots])
    np.testing.assert_allclose(rows.values, plain(ROW_LOCAL[name](), values, gradients), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "AdamW", "RMSprop"])
def test_other_rows_and_their_slots_stay(name):
    rows = Rows(ROW_LOCAL[name](), noise(0, 6))
    rows.update(range(6), noise(1, 6))
    before = [column.copy() for column in rows.columns]
    rows.update([4, 1], noise(2, 2))
    for column, old in zip(rows.columns, before, strict=True):
        np.testing.assert_array_equal(column[[0, 2, 3, 5]], old[[0, 2, 3, 5]])
        assert (column[[1, 4]] != old[[1, 4]]).any()


@pytest.mark.parametrize("name", ["SGD, momentum", "Nadam", "Adam, amsgrad, schedule"])
def test_an_update_of_several_blocks_is_one_step(monkeypatch, name):
    """200 rows in blocks of 64, 64, 64 and 8 of 64, then 70, then one."""
    monkeypatch.setattr(row_optimizer, "_MOST_ELEMENTS", 64 * DIM)
    values = noise(0, 200)
    gradients = [noise(step, 200) for step in range(1, 4)]
    rows = Rows(ROW_LOCAL[name](), values)
    for gradient in gradients:
        rows.update(range(200), gradient)
    np.testing.assert_allclose(rows.values, plain(ROW_LOCAL[name](), values, gradients), rtol=2e-6, atol=1e-7)
    assert rows.optimizer.iterations == 3


def test_blocks_share_iterations_and_learning_rate():
    """Each row has the steps in which it is updated; iterations and the learning rate are common."""
    values, sizes = noise(0, 300), [300, 10, 100, 300, 64, 65]
    rows = Rows(optimizers.Nadam(0.01), values)
    alone = Rows(optimizers.Nadam(0.01), values)
    for step, size in enumerate(sizes):
        if step == 3:
            rows.optimizer.set_learning_rate(0.5)
            alone.optimizer.set_learning_rate(0.5)
        gradient = noise(step + 1, size)
        rows.update(range(size), gradient)
        alone.update([5], gradient[5:6])
    np.testing.assert_allclose(rows.values[5], alone.values[5], rtol=1e-6)
    assert rows.optimizer.iterations == alone.optimizer.iterations == len(sizes)


def test_padding_of_a_block_has_no_effect():
    """Also where it is not finite."""
    clean, dirty = (Rows(optimizers.Adam(0.1), noise(0, 5)) for _ in range(2))
    for buffer in dirty.optimizer._buffers:
        buffer[:] = np.nan
    for step in range(3):
        for rows in (clean, dirty):
            rows.update([3, 1], noise(step, 2))
    for column, other in zip(clean.columns, dirty.columns, strict=True):
        np.testing.assert_array_equal(column, other)


def test_graphs_are_made_for_powers_of_two_only():
    rows = Rows(optimizers.SGD(0.1, momentum=0.9), noise(0, 500))
    for size in (*range(0, 256, 7), 256):
        rows.update(range(size), noise(1, size))
    assert sorted(rows.optimizer._blocks) == [64, 128, 256]


def test_an_update_without_rows_counts():
    """So that servers that have no key of a step keep their iterations equal."""
    rows, other = Rows(optimizers.Nadam(0.1), noise(0, 2)), Rows(optimizers.Nadam(0.1), noise(0, 2))
    rows.update([], noise(0, 0))
    other.update([0], noise(0, 1))
    assert rows.optimizer.iterations == 1
    np.testing.assert_array_equal(rows.values, noise(0, 2))
    for scalar, expected in zip(rows.optimizer.scalars, other.optimizer.scalars, strict=True):
        np.testing.assert_array_equal(scalar, expected)


def test_float64_rows_equal_keras():
    values, gradients = noise(0, 4, dtype=np.float64), [noise(step, 4, dtype=np.float64) for step in range(1, 4)]
    rows = Rows(optimizers.Adagrad(0.1), values, np.float64)
    for gradient in gradients:
        rows.update(range(4), gradient)
    np.testing.assert_allclose(rows.values, plain(optimizers.Adagrad(0.1), values, gradients), rtol=1e-13)


def test_slots_can_start_with_the_rows_value():
    class Anchored(optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.anchors = [self.add_variable_from_reference(reference, "anchor") for reference in variables]
            for anchor, variable in zip(self.anchors, variables, strict=True):
                anchor.assign(variable)

        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, self.anchors[0] - learning_rate * gradient)

    with keras.saving.custom_object_scope({"Anchored": Anchored}):
        rows = Rows(Anchored(1.0), noise(0, 4))
        for step in (1, 2):
            rows.update([0, 2], noise(step, 2))
    np.testing.assert_allclose(rows.values[[0, 2]], noise(0, 4)[[0, 2]] - noise(2, 2), rtol=1e-6)


class RowwiseAdagrad(optimizers.Optimizer):
    """One accumulator for each row."""

    def build(self, variables):
        super().build(variables)
        self.sums = [
            self.add_variable((variable.shape[0],), "ones", variable.dtype, name="sums") for variable in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.sums[0], keras.ops.mean(keras.ops.square(gradient), axis=1))
        scale = keras.ops.expand_dims(keras.ops.rsqrt(self.sums[0]), 1)
        self.assign_sub(variable, learning_rate * gradient * scale)


def test_slots_can_have_one_number_per_row():
    with keras.saving.custom_object_scope({"RowwiseAdagrad": RowwiseAdagrad}):
        rows = Rows(RowwiseAdagrad(0.5), noise(0, 4))
        for step in (1, 2):
            rows.update([3, 1], noise(step, 2))
    gradients = noise(1, 2), noise(2, 2)
    sums = 1 + (gradients[0] ** 2).mean(axis=1), 1 + (gradients[0] ** 2 + gradients[1] ** 2).mean(axis=1)
    expected = noise(0, 4)
    for gradient, total in zip(gradients, sums, strict=True):
        expected[[3, 1]] -= 0.5 * gradient / np.sqrt(total)[:, np.newaxis]
    np.testing.assert_allclose(rows.values, expected, rtol=1e-5)
    np.testing.assert_allclose(rows.columns[1], [1, sums[1][1], 1, sums[1][0]], rtol=1e-6)


def test_learning_rate_can_be_set_unless_scheduled():
    rows = Rows(optimizers.SGD(1.0), np.zeros((2, DIM), np.float32))
    rows.optimizer.set_learning_rate(0.25)
    rows.update([1], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(rows.values, [[0] * DIM, [-0.25] * DIM])
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        Rows(optimizers.SGD(schedule()), np.zeros((2, DIM), np.float32)).optimizer.set_learning_rate(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optimizers.Adam(clipnorm=1.0),
            r"Adam\(clipnorm=…\) cannot be used .*: it needs the norm .* use clipvalue=",
        ),
        (lambda: optimizers.SGD(global_clipnorm=1.0), r"SGD\(global_clipnorm=…\)"),
        (lambda: optimizers.SGD(use_ema=True), r"SGD\(use_ema=…\)"),
        (lambda: optimizers.SGD(gradient_accumulation_steps=2), r"SGD\(gradient_accumulation_steps=…\)"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.SGD()), "LossScaleOptimizer skips a step"),
        (lambda: optimizers.Muon(), "Muon cannot be used .* depends on other rows"),
        (lambda: optimizers.Lamb(), "Lamb cannot be used .* depends on other rows"),
        (lambda: optimizers.Adafactor(), r"Adafactor keeps state of shape \(3,\) for a variable of shape \(64, 3\)"),
    ],
)
def test_optimizers_that_need_the_whole_variable_raise(make, message):
    with pytest.raises(ValueError, match=message):
        Rows(make(), noise(0, 2))


def test_adafactor_raises_if_columns_equal_block_rows():
    with pytest.raises(ValueError, match="Adafactor"):
        Rows(optimizers.Adafactor(), noise(0, 2, dim=64))
