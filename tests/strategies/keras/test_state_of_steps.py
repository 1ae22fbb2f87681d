import keras
import numpy as np
import pytest

from tests.strategies.keras.kept_state import DTYPES, model_with_state
from tests.strategies.ranked import Ranked, in_step, on_ranks
from tfdist.strategies.keras.keras_assignments import Assigned, copy_of
from tfdist.strategies.keras.state_of_steps import StateOfMetrics, StateOfStep


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
