"""Which process holds what of an optimizer; `tests/multiprocess/test_sharded_optimizer.py` has files and callbacks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards
from tfdist.strategies.divided.described_variables import ElsewhereError


def model_of(strategy, units=(3, 2), optimizer=keras.optimizers.Adam):
    with strategy.scope():
        layers = [keras.layers.Dense(count, kernel_initializer="ones") for count in units]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(optimizer(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def test_ranks_hold_different_variables_of_the_optimizer(ranks):
    def work(group):
        strategy = RankedShards(group)
        model = model_of(strategy)
        extended, slots = strategy.extended, model.optimizer.variables[2:]
        extended.place(model)
        assert {id(slot) for slot in extended.per_process_variables(model)} == {id(slot) for slot in slots}
        assert all(extended.holds(model, weight) for weight in model.weights)
        held = [extended.holds(model, slot) for slot in slots]
        with pytest.raises(ElsewhereError, match=f"held by rank {1 - group.rank}"):
            slots[held.index(False)].numpy()
        return held

    first, second = ranks(2)(work)
    assert all(here != there for here, there in zip(first, second, strict=True))


def test_fewer_variables_than_processes_are_updated_by_all(ranks, caplog):
    def work(group):
        strategy = RankedShards(group)
        model = model_of(strategy, units=(1,))
        return strategy.extended.ready(model.optimizer), [slot.numpy().sum() for slot in model.optimizer.variables[2:]]

    assert ranks(3)(work) == [(None, [0.0] * 4)] * 3
    assert "2 for 3 processes: each process updates all of them" in caplog.text


class OwnClipping(keras.optimizers.Adam):
    def _clip_gradients(self, grads):
        return grads


def test_an_optimizer_that_clips_in_its_own_way_is_not_divided(ranks, caplog):
    def work(group):
        strategy = RankedShards(group)
        with strategy.scope():
            optimizer = OwnClipping(name="own")
            optimizer.build([keras.Variable(np.zeros(2)) for _ in range(4)])
        return strategy.extended.dealing(optimizer)

    assert ranks(2)(work) == [None, None]
    assert "own clips gradients in a method of its own" in caplog.text


def test_one_process_alone_deals_nothing(ranks):
    def work(group):
        strategy = RankedShards(group)
        return strategy.extended.ready(model_of(strategy).optimizer)

    assert ranks(1)(work) == [None]


def test_all_get_the_values_of_the_owners(ranks):
    def work(group):
        strategy = RankedShards(group)
        model = model_of(strategy)
        dealing = strategy.extended.ready(model.optimizer)
        with strategy.extended.updating(model.optimizer):
            for weight in model.trainable_variables:
                weight.assign(np.full(weight.shape, group.rank))
        return [(dealing.owner(weight).owner, weight.numpy().min(), weight.numpy().max()) for weight in model.weights]

    first, second = ranks(2)(work)
    assert first == second
    assert all(owner == least == most for owner, least, most in first)
    assert {owner for owner, _, _ in first} == {0, 1}


def test_the_writer_reads_what_others_hold(ranks):
    def work(group):
        strategy = RankedShards(group)
        model = model_of(strategy)
        strategy.extended.place(model)
        slots = model.optimizer.variables[2:]
        for place, slot in enumerate(slots):
            if strategy.extended.holds(model, slot):
                slot.assign(tf.fill(slot.shape, float(place)))
        return strategy.extended.run_on_writer(model, lambda: [float(slot.numpy().min()) for slot in slots])

    assert ranks(2)(work) == [[float(place) for place in range(8)], None]


class Keeping(keras.optimizers.SGD):
    """An optimizer with a variable that belongs to no weight."""

    def build(self, variables):
        super().build(variables)
        self.history = self.add_variable((4,), name="history")


def test_an_optimizer_whose_variables_are_not_known_is_not_divided(ranks, caplog):
    def work(group):
        strategy = RankedShards(group)
        model = model_of(strategy, optimizer=lambda: Keeping(0.1, momentum=0.9))
        return strategy.extended.ready(model.optimizer), [slot.numpy().sum() for slot in model.optimizer.variables[2:]]

    assert ranks(2)(work) == [(None, [0.0] * 5)] * 2
    assert "to which weight the variable keeping/history" in caplog.text.replace("keeping_1", "keeping")
