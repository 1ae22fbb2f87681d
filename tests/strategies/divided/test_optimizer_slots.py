"""The variables that an optimizer keeps for each that it updates."""

import keras

from tfdist.strategies.divided.optimizer_slots import optimizer_variables, slots_by_variable


def built(optimizer):
    trained = [keras.Variable([[1.0, 2.0]]), keras.Variable([3.0])]
    optimizer.build(trained)
    return trained, optimizer


def test_slots_are_found_with_their_variables():
    trained, optimizer = built(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2))
    found = list(slots_by_variable(optimizer))
    assert len(found) == 2 * 4  # two moments, the average and the accumulator
    for variable, slot in found:
        assert slot.shape == variable.shape
    assert {id(variable) for variable, _ in found} == {id(variable) for variable in trained}


def test_optimizer_variables_contain_those_of_the_inner_one_and_not_the_weights():
    trained, optimizer = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)))
    ids = {id(variable) for variable in optimizer_variables(optimizer)}
    assert ids >= {id(variable) for variable in (*optimizer.variables, *optimizer.inner_optimizer.variables)}
    assert ids.isdisjoint(id(variable) for variable in trained)
