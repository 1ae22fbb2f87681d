"""Variables of an optimizer that are dealt to processes."""

import keras
import numpy as np
import pytest

from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.dealing import Dealing, contained

described_variables.install()

SHAPES = [(2, 3), (3,), (3, 5), (5,), (1,)]


def variables():
    return [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]


@pytest.mark.parametrize(("processes", "counts"), [(1, [30]), (2, [15, 15]), (3, [15, 8, 7])])
def test_bytes_are_even_and_the_same_on_all_ranks(processes, counts):
    trained = variables()
    dealings = [Dealing(trained, processes, rank) for rank in range(processes)]
    for variable in trained:
        assert len({dealing.owner(variable) for dealing in dealings}) == 1
    owners = [dealings[0].owner(variable) for variable in trained]
    held = [
        sum(int(np.prod(shape)) for shape, owner in zip(SHAPES, owners, strict=True) if owner == rank)
        for rank in range(processes)
    ]
    assert sorted(held, reverse=True) == counts


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Adafactor, keras.optimizers.Ftrl])
def test_each_slot_is_on_one_rank_and_other_variables_are_on_all(optimizer):
    kept = []
    for rank in range(2):
        trained = variables()
        dealing = Dealing(trained, 2, rank)
        with described_variables.describing():
            made = optimizer(use_ema=True, gradient_accumulation_steps=2)
            made.build(trained)
        dealing.place(made)
        dealing.place(made)  # changes nothing
        kept.append([not described_variables.is_elsewhere(variable) for variable in made.variables])
        assert all(owner in (0, 1) for _, owner in dealing.slots.values())
        others = [variable for variable in made.variables if id(variable) not in dealing.slots]
        assert {variable.name for variable in others} <= {"iteration", "learning_rate"}
    for number, (first, second) in enumerate(zip(*kept, strict=True)):
        assert (first and second) if number < 2 else first != second, number


def test_variables_that_were_not_dealt_are_an_error():
    with pytest.raises(KeyError):
        Dealing(variables(), 2, 0).owner(keras.Variable([1.0]))


def test_contained_optimizers_are_listed_once():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert contained([outer, inner]) == [outer, inner]
