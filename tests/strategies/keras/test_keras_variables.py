import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, in_step, on_ranks
from tfdist.strategies.keras.keras_variables import (
    Assigned,
    StateOfMetrics,
    StateOfStep,
    average_state,
    broadcast_state,
    check_scope,
    copy_of,
    state_of_layers,
)

KEPT = ["sum", "mean", "only_first_replica", "none"]
WHOLE = ["int32", "bool"]
DTYPES = ["float32", "float16", "bfloat16", *WHOLE]


class Keeps(keras.layers.Layer):
    """Keeps state of every dtype and aggregation beside a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(), initializer="ones", name="kernel")
        self.kept = {
            (dtype, aggregation): self.add_weight(
                shape=(1,), dtype=dtype, initializer="zeros", trainable=False, aggregation=aggregation,
                name=f"{dtype}_{aggregation}",
            )
            for dtype in DTYPES
            for aggregation in KEPT
            if dtype not in WHOLE or aggregation != "mean"  # which TensorFlow has of floating point only
        }  # fmt: skip

    def call(self, x):
        return x * self.kernel


def model_with_state(strategy):
    with strategy.scope():
        layer = Keeps()
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        model.compile("sgd", "mse")
    return model, layer


@pytest.fixture(scope="module")
def strategy(ranks):
    return Ranked(ranks(1).groups[0])


def test_state_of_layers_becomes_equal_by_its_aggregation(ranks):
    """Rank 0 has three samples of four and assigns 4, rank 1 assigns 8; what was there before is 2."""

    results = kept_after_a_step(ranks, lambda dtype, aggregation: (dtype, aggregation) != ("bool", "sum"))
    assert results[0] == results[1]
    for dtype in DTYPES:
        by_samples = {"bool": 1, "int32": 4}.get(dtype, 5)  # of integers the chief's
        expected = {"sum": 2 + (4 - 2) + (8 - 2), "mean": by_samples, "only_first_replica": min(4, by_samples)}
        for kept, value in (expected | {"none": by_samples}).items():
            assert results[0].get((dtype, kept), value) == value, (dtype, kept)


def test_booleans_are_added_up_if_that_is_asked_for(ranks):
    results = kept_after_a_step(ranks, lambda dtype, aggregation: (dtype, aggregation) == ("bool", "sum"))
    assert results == [{("bool", "sum"): 1.0}] * 2


def kept_after_a_step(ranks, chosen):
    """What a layer keeps on each rank, of the chosen dtypes and aggregations."""

    def work(strategy):
        model, layer = model_with_state(strategy)
        kept = {kind: variable for kind, variable in layer.kept.items() if chosen(*kind)}
        for variable in kept.values():
            variable.assign([variable.dtype != "bool" and 2])
        assigned = Assigned()

        def step():
            state = StateOfStep(model, strategy.extended, assigned)
            with assigned.noted():
                for variable in kept.values():
                    variable.assign([4 + 4 * strategy.rank if variable.dtype != "bool" else strategy.rank == 0])
            state.merge()

        in_step(strategy, (3, 1)[strategy.rank], 4, step)
        return {kind: float(copy_of(variable).numpy()[0]) for kind, variable in kept.items()}

    return on_ranks(ranks(2), work)


def test_an_empty_share_changes_nothing(ranks):
    def work(strategy):
        model, layer = model_with_state(strategy)
        chosen = [layer.kept["float32", kept] for kept in ("sum", "mean")]
        assigned = Assigned()

        def step():
            state = StateOfStep(model, strategy.extended, assigned)
            with assigned.noted():
                for variable in chosen:
                    variable.assign([np.nan if strategy.rank else 3.0])
            state.merge()

        in_step(strategy, 1 - strategy.rank, 1, step)
        return [float(copy_of(variable).numpy()[0]) for variable in chosen]

    assert on_ranks(ranks(2), work) == [[3.0, 3.0]] * 2


def test_unassigned_state_is_not_communicated(ranks):
    def work(strategy):
        model, _ = model_with_state(strategy)
        before = strategy.extended.group.engine.statistics.collectives
        in_step(strategy, 1, 2, lambda: StateOfStep(model, strategy.extended, Assigned()).merge())
        return strategy.extended.group.engine.statistics.collectives - before

    assert on_ranks(ranks(2), work) == [0, 0]


def test_state_is_neither_weights_nor_frozen_ones_nor_metrics_nor_seeds(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(2),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    model.layers[0].trainable = False
    assert [variable.name for variable in state_of_layers(model)] == ["moving_mean", "moving_variance"]


def test_metrics_forget_a_stand_in_row(strategy):
    with strategy.scope():
        seen, unseen = keras.metrics.Sum(), keras.metrics.Sum()
    for samples in (2, 0):
        assigned = Assigned()

        def step(assigned=assigned):
            state = StateOfMetrics([*seen.variables, *unseen.variables], strategy.extended.shares)
            with assigned.noted():
                seen.update_state(5.0)
            state.forget_stand_in(assigned)

        in_step(strategy, samples, 2, step)
        assert assigned.among(unseen.variables) == []
        assert float(seen.result()) == 5.0


def test_assignments_are_noted_by_their_thread_inside_the_block(strategy):
    with strategy.scope():
        first, second, third = (keras.Variable(0.0) for _ in range(3))
    outer, inner = Assigned(), Assigned()

    def step():
        with outer.noted():
            second.assign(1.0)
            with inner.noted():
                third.assign(2.0)
            first.assign_add(3.0)
            second.assign(4.0)
        third.assign(5.0)

    in_step(strategy, 1, 1, step)
    assert outer.among([first, second, third]) == [second, first]
    assert outer.among([first]) == [first]
    assert len(outer.values[id(second)]) == 2
    assert inner.among([first, second, third]) == [third]
    assert [float(variable) for variable in (first, second, third)] == [3.0, 4.0, 5.0]


def test_check_scope_raises_for_objects_made_outside(strategy):
    with strategy.scope():
        inside = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        inside.compile("sgd", "mse")
    check_scope(inside)
    body = keras.Sequential([keras.layers.Input((2,)), *(keras.layers.Dense(2, name=f"body_{n}") for n in range(3))])
    with strategy.scope():
        mixed = keras.Sequential([body, inside])
    with pytest.raises(
        ValueError, match=r"outside of strategy.scope\(\): .*body_0/kernel, .*body_0/bias, .*, …\. Create the"
    ):
        check_scope(mixed)
    optimizer = keras.optimizers.SGD(name="mine")
    inside.optimizer = optimizer
    with pytest.raises(ValueError, match="the optimizer mine"):
        check_scope(inside)


def test_broadcast_state_sends_weights_and_optimizer_of_chief(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
            model.optimizer.build(model.trainable_variables)
        variables = [*model.variables, *model.optimizer.variables]
        for variable in variables:
            variable.assign(tf.cast(tf.fill(variable.shape, 5 + strategy.rank), variable.dtype))
        broadcast_state(model, strategy.extended)
        return {float(value) for variable in variables for value in np.ravel(variable.numpy())}

    assert on_ranks(ranks(2), work) == [{5.0}] * 2


def test_all_optimizers_of_a_model_are_broadcast(ranks):
    """Also those that the model or one of its layers has in an attribute, a list or a dictionary."""

    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            direct, listed, named, inner = (keras.optimizers.Adam(0.1) for _ in range(4))
            model.own, model.listed, model.layers[0].named = direct, [[listed]], {"a": named, 1: None}
            model.scaled = keras.optimizers.LossScaleOptimizer(inner)
            model.own.build(model.trainable_variables)
        optimizers = (direct, listed, named, inner)
        for variable in direct.variables:
            variable.assign(tf.cast(tf.fill(variable.shape, 5 + strategy.rank), variable.dtype))
        for optimizer in (listed, named, inner):
            optimizer.iterations.assign(5 + strategy.rank)
        broadcast_state(model, strategy.extended)
        return values_of(direct) | {int(optimizer.iterations) for optimizer in optimizers}

    def values_of(optimizer):
        return {float(value) for variable in optimizer.variables for value in np.ravel(variable.numpy())}

    assert on_ranks(ranks(2), work) == [{5.0}] * 2


def test_state_is_averaged_over_ranks_with_finite_values(ranks):
    """As a loop of the user's own leaves it; integers stay."""

    def work(strategy):
        model, layer = model_with_state(strategy)
        both, one, nobody, half, integer = (
            layer.kept[kind]
            for kind in [("float32", "mean"), ("float32", "sum"), ("float32", "none"), ("bfloat16", "mean"),
                         ("int32", "none")]
        )  # fmt: skip
        both.assign([1.0 + strategy.rank])
        one.assign([[np.nan, 7.0][strategy.rank]])
        nobody.assign([[np.nan, np.inf][strategy.rank]])
        half.assign([2.0 * strategy.rank])
        integer.assign([strategy.rank])
        average_state(model, strategy.extended)
        return [float(variable[0]) for variable in (both, one, half, integer)], float(nobody[0])

    (first, nan), (second, infinity) = on_ranks(ranks(2), work)
    assert (first, second) == ([1.5, 7.0, 1.0, 0.0], [1.5, 7.0, 1.0, 1.0])
    assert np.isnan(nan)
    assert np.isinf(infinity)
