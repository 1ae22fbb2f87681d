import keras
import numpy as np
import pytest

from tfdist.parameter_server.shard import slots

NAMES = {
    "SGD": [],
    "Adam": ["momentum", "velocity"],
    "Adagrad": ["accumulator"],
    "Nadam": ["momentum", "velocity"],
    "Lamb": ["momentum", "velocity"],
}


def variables():
    """Two of one name."""
    return [keras.Variable(np.ones((4, 3), "float32"), name="a"), keras.Variable(np.ones(3, "float32"), name="a")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_built", [False, True])
def test_slots_are_assigned_to_their_variables(name, is_built):
    optimizer, made = getattr(keras.optimizers, name)(0.1, use_ema=True), variables()
    if is_built:
        optimizer.build(made)
    built = slots.slots_of_built(optimizer, made) if is_built else slots.build(optimizer, made)
    for place in range(2):
        variable_slots = [slot for slot in built if slot.variable == place]
        assert [slot.name for slot in variable_slots] == ["average", *NAMES[name]]
        assert all(tuple(slot.value.shape) == tuple(made[place].shape) for slot in variable_slots)
        assert all(any(slot.value is variable for variable in optimizer.variables) for slot in variable_slots)
    assert "add_variable_from_reference" not in vars(optimizer)


@pytest.mark.parametrize("is_built", [False, True])
def test_factors_of_another_shape_are_slots(is_built):
    optimizer = keras.optimizers.Adafactor(0.1)
    made = [*variables(), keras.Variable(np.ones((2, 5), "float32"), name="a")]
    if is_built:
        optimizer.build(made)
    built = slots.slots_of_built(optimizer, made) if is_built else slots.build(optimizer, made)
    shapes = [(slot.variable, slot.name, tuple(slot.value.shape)) for slot in built]
    assert shapes == [
        (0, "factor_0", (4,)), (0, "factor_1", (3,)), (0, "velocity", (4, 3)),
        (1, "velocity", (3,)),
        (2, "factor_0", (2,)), (2, "factor_1", (5,)), (2, "velocity", (2, 5)),
    ]  # fmt: skip
    assert "add_variable" not in vars(optimizer)


def test_scalars_contain_rate_iteration_and_momentum_product():
    optimizer = keras.optimizers.Nadam(0.25)
    scalars = slots.scalars_of(optimizer, slots.build(optimizer, variables()))
    assert float(scalars["learning_rate"].numpy()) == 0.25
    assert scalars["iteration"] is optimizer.iterations
    assert len(scalars) == 3, "and the product of the momentum's schedule"
