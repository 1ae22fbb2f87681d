"""Variables of an optimizer that are dealt to processes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    owners = [dealings[0].owner(variable).owner for variable in trained]
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
        assert dealing.place(made) == []
        dealing.place(made)  # changes nothing
        kept.append([not described_variables.is_elsewhere(variable) for variable in made.variables])
        assert all(dealing.owner(slot).owner in (0, 1) for slot in dealing.slots)
        others = [variable for variable in made.variables if id(variable) not in {id(slot) for slot in dealing.slots}]
        assert {variable.name for variable in others} <= {"iteration", "learning_rate"}
    for number, (first, second) in enumerate(zip(*kept, strict=True)):
        assert (first and second) if number < 2 else first != second, number


def test_slots_of_weights_that_all_update_are_not_dealt():
    trained = variables()
    dealing = Dealing(trained, 2, 0, deals=False)
    optimizer = keras.optimizers.Adam()
    optimizer.build(trained)
    assert dealing.find_slots(optimizer) == dealing.slots == []


def test_large_variables_are_cut(monkeypatch):
    """Each rank has rows of what the optimizer keeps for them, and the variable is these rows in a context."""
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)
    constrained = keras.Variable(np.zeros((9, 5), "float32"), name="constrained")
    constrained.constraint = keras.constraints.NonNeg()
    large = keras.Variable(np.arange(20.0).reshape(10, 2), dtype="float32", name="large")
    for rank in range(2):
        dealing = Dealing([constrained, large], 2, rank, cuts=True)
        with described_variables.describing():
            optimizer = keras.optimizers.Ftrl(initial_accumulator_value=0.25)
            optimizer.build([constrained, large])
        assert dealing.place(optimizer) == []
        assert dealing.owner(constrained).owner is not None, "a constraint looks at the whole variable"
        slots = [slot for slot in dealing.slots if slot.shape == (10, 2)]
        assert all(described_variables.is_elsewhere(slot) for slot in slots)
        assert [dealing.part(slot).shape[0] for slot in slots] == [5, 5]
        assert [float(dealing.part(slot)[4, 1]) for slot in slots] == [0.25, 0.0]
        with pytest.raises(described_variables.ElsewhereError, match="held by all processes, of which each"):
            slots[0].numpy()
        large.assign(large + 100.0)
        dealing.refresh()
        with dealing.parts():
            assert large.shape == slots[0].shape == (5, 2)
            assert large.value.name == "large:0", "names say which weights do not decay"
            np.testing.assert_array_equal(
                large.numpy(), 100 * (rank + 1) + np.arange(20.0).reshape(10, 2)[5 * rank :][:5]
            )
        assert large.shape == slots[0].shape == (10, 2)
        dealing.assign_part(slots[0], np.arange(20.0).reshape(10, 2))
        assert float(dealing.part(slots[0])[0, 0]) == 10 * rank
        assert dealing.nbytes(slots) == [80, 80]


def test_variables_of_tensorflow_stay_whole(monkeypatch):
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)
    large = tf.Variable(np.zeros((10, 2), "float32"))
    assert Dealing([large, keras.Variable([1.0])], 2, 0, cuts=True).owner(large).owner == 0


def test_a_process_without_a_variable_is_told():
    assert not Dealing(variables()[:2], 3, 0).is_complete
    assert Dealing(variables()[:3], 3, 0).is_complete


class Own(keras.optimizers.Optimizer):
    """An optimizer that keeps sums in a dictionary, and a variable that belongs to no weight."""

    def build(self, variables):
        super().build(variables)
        self.sums = {
            str(place): self.add_variable(variable.shape, name="sum") for place, variable in enumerate(variables)
        }
        self.history = self.add_variable((4,), name="history")


def test_slots_in_dictionaries_are_found_and_strays_are_named():
    trained = variables()
    optimizer = Own(0.1)
    optimizer.build(trained)
    dealing = Dealing(trained, 2, 0)
    assert {variable.name for variable in dealing.place(optimizer)} == {"history"}
    assert [id(slot) for slot in dealing.slots] == [id(slot) for slot in optimizer.sums.values()]


def test_variables_that_were_not_dealt_are_an_error():
    with pytest.raises(KeyError):
        Dealing(variables(), 2, 0).owner(keras.Variable([1.0]))


def test_contained_optimizers_are_listed_once():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert contained([outer, inner]) == [outer, inner]
