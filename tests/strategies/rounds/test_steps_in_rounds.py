import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedLocal
from tfdist.local_sgd.intervals import Every, QuadraticRule
from tfdist.local_sgd.rounds import LocalSGD, Settings
from tfdist.local_sgd.rules import Averaging
from tfdist.strategies.rounds.steps_in_rounds import Centre, StepsInRounds, assign, slots_of


def test_slots_of_excludes_learning_rate_and_iterations():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(np.zeros(2), name="w")])
    names = {variable.name for variable in slots_of(optimizer)}
    assert len(names) == 3, names
    assert not names & {"learning_rate", "iterations"}
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    scaled.build([keras.Variable(np.zeros(2), name="w")])
    assert len(slots_of(scaled)) == 2


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_weights_are_exchanged_when_it_is_their_turn(ranks, in_graph, delay):
    def work(group):
        strategy = RankedLocal(group)
        with strategy.scope():
            weights = keras.Variable(np.zeros(2), name="weights")
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weights])
        settings = Settings(Every(3), Averaging, delay=delay)
        steps = StepsInRounds(optimizer, 0, LocalSGD(group, settings, None, ""), [])

        def step():
            weights.value.assign_add(tf.fill([2], tf.constant(1 + 2 * group.rank, weights.dtype)))
            steps.take(4)

        if in_graph:
            step = tf.function(step)
        values = []
        for _ in range(5):
            step()
            values.append(weights.numpy()[0])
        assert steps.is_under_way
        steps.settle()
        steps.take_centre()
        assert not steps.is_under_way
        return [*values, weights.numpy()[0]]

    first, second = ranks(2)(work)
    if delay:  # the mean after three steps is used after the fourth
        assert (first, second) == ([1, 2, 3, 6, 7, 8], [3, 6, 9, 6, 9, 8])
    else:
        assert (first, second) == ([1, 2, 6, 7, 8, 10], [3, 6, 6, 9, 12, 10])


def test_a_function_that_makes_the_counters_is_traced_once(ranks):
    """If it had made variables by its own creator, TensorFlow would trace it once more."""

    def work(group):
        strategy, made, traces = RankedLocal(group), [], []
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([keras.Variable(np.zeros(2), name="weights")])

        @tf.function
        def step():
            traces.append("traced")
            if not made:
                made.append(StepsInRounds(optimizer, 0, LocalSGD(group, Settings(Every(3), Averaging), None, ""), []))
            made[0].take(4)

        with strategy.scope():
            step()
        return len(traces)

    assert ranks(1)(work) == [1]


def test_values_that_are_assigned_are_the_new_beginning(ranks):
    def work(group):
        strategy = RankedLocal(group)
        with strategy.scope():
            weights = keras.Variable(np.zeros(2), name="weights")
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weights])
        settings = Settings(Every(2), Averaging, start_after=10)
        steps = StepsInRounds(optimizer, 0, LocalSGD(group, settings, None, ""), [])
        weights.assign(np.full(2, 8.0))
        steps.assigned(weights)
        optimizer.iterations.assign(20)
        steps.begin()
        assign([weights], [np.full(2, 8.0 + group.rank)])  # as a step does
        steps.take(1)
        assert weights.numpy()[0] == 8.0 + group.rank, "20 steps are more than those of the start"
        steps.settle()
        steps.take_centre()
        return weights.numpy()[0]

    assert ranks(2)(work) == [8.5, 8.5]


def test_an_interval_follows_a_rate_that_is_set_between_rounds(ranks):
    """Within a round only the next one does."""

    def work(group):
        with RankedLocal(group).scope():
            weights = keras.Variable(np.zeros(2), name="weights")
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weights])
        settings = Settings(QuadraticRule(alpha=0.1, at_least=1, at_most=100), Averaging)
        steps = StepsInRounds(optimizer, 0, LocalSGD(group, settings, None, ""), [])
        lefts = []
        for rate, taken in ((0.1, 0), (0.05, 0), (0.025, 1), (0.1, 0)):
            optimizer.learning_rate = rate
            steps.assigned(optimizer._learning_rate)
            lefts.append(int(steps._left))
            for _ in range(taken):
                steps.take(1)
        steps.settle()
        steps.take_centre()
        return [*lefts, int(steps._left)]

    assert ranks(1)(work) == [[1, 4, 16, 15, 1]]


def test_rounds_go_on_at_the_step_of_a_restored_optimizer(ranks):
    """Steps whose gradients are accumulated count, too."""

    def work(group):
        with RankedLocal(group).scope():
            weights = keras.Variable(np.zeros(2), name="weights")
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            optimizer.build([weights])
        optimizer._iterations.assign(12)
        steps = StepsInRounds(optimizer, 0, LocalSGD(group, Settings(Every(2), Averaging), None, ""), [])
        return steps.progress.step

    assert ranks(1)(work) == [12]


def test_a_centre_can_be_renewed(ranks):
    def work(group):
        with RankedLocal(group).scope():
            weights = keras.Variable(np.zeros(2), name="weights")
            other = keras.Variable(np.zeros(2), name="other")
        Centre([weights])
        for variable in (weights, other):
            variable.assign(np.ones(2))
            Centre.renew(variable)
        assert not hasattr(other, "_tfdist_centre")
        return Centre([weights])[0].tolist()

    assert ranks(1)(work) == [[1.0, 1.0]]


def test_optimizers_of_one_variable_have_one_centre(ranks):
    def work(group):
        with RankedLocal(group).scope():
            weights = keras.Variable(np.zeros(2), name="weights")
        first, second = Centre([weights]), Centre([weights])
        first[0] = np.ones(2)
        assert len(second) == 1
        return second[0].tolist()

    assert ranks(1)(work) == [[1.0, 1.0]]
