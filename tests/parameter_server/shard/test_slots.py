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


def test_scalars_contain_rate_iteration_and_momentum_product():
    optimizer = keras.optimizers.Nadam(0.25)
    scalars = slots.scalars_of(optimizer, slots.build(optimizer, variables()))
    assert float(scalars["learning_rate"].numpy()) == 0.25
    assert scalars["iteration"] is optimizer.iterations
    assert len(scalars) == 3, "and the product of the momentum's schedule"
