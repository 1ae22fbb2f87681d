import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, in_step, on_ranks
from tfdist.strategies.keras import keras_metrics
from tfdist.strategies.keras.keras_assignments import MERGED_BY, Assigned


class Keeps(keras.metrics.Metric):
    """Keeps a variable of every kind."""

    def __init__(self, aggregations, dtype="float32"):
        super().__init__(name="keeps")
        self.kept = [
            self.add_variable((2,), initializer="zeros", dtype=dtype, aggregation=aggregation, name=aggregation)
            for aggregation in aggregations
        ]

    def update_state(self, value):
        for variable in self.kept:
            variable.assign(tf.cast(value, variable.dtype))

    def result(self):
        return self.kept[0].value


def merged_values(strategy, metric, value):
    strategy.run(lambda: metric.update_state(value))
    return [value.numpy().tolist() for _, value in keras_metrics.merged(metric.variables, strategy.extended)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_state_is_merged_by_its_aggregation(ranks, dtype):
    def work(strategy):
        with strategy.scope():
            metric = Keeps(["sum", *(["mean"] if dtype != "int32" else []), "only_first_replica"], dtype)
        pairs = merged_values(strategy, metric, [4.0 + 2 * strategy.rank, 1.0])
        assert all(variable.value.dtype == dtype for variable in metric.variables)
        return pairs

    expected = [[10, 2], [5, 1], [4, 1]] if dtype != "int32" else [[10, 2], [4, 1]]
    assert on_ranks(ranks(2), work) == [expected] * 2


def test_means_of_one_process_are_of_its_own_replicas(ranks):
    def work(strategy):
        with strategy.scope():
            metric = Keeps(["mean"])
        strategy.run(lambda: metric.update_state([4.0 + 2 * strategy.rank, 1.0]))
        ((_, mean),), _ = keras_metrics.merged_beside(metric.variables, [], strategy.extended, locally=True)
        return mean.numpy().tolist()

    assert on_ranks(ranks(2), work, devices=["CPU:0", "CPU:1"]) == [[4, 1], [6, 1]]


@pytest.mark.parametrize(("kind", "expected"), [("max", [6, 1]), ("min", [4, 1]), ("sum", [10, 2])])
def test_inferred_merge_rule_overrides_aggregation(ranks, kind, expected):
    """Whatever its aggregation."""

    def work(strategy):
        with strategy.scope():
            metric = Keeps(["none", "sum"])
        for variable in metric.variables:
            setattr(variable, MERGED_BY, kind)
        return merged_values(strategy, metric, [4.0 + 2 * strategy.rank, 1.0])

    assert on_ranks(ranks(2), work) == [[expected, expected]] * 2


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_booleans_are_true_where_any_is(ranks, devices):
    def work(strategy):
        with strategy.scope():
            metric = Keeps(["sum"], "bool")
        return merged_values(strategy, metric, [strategy.rank == 1, False])

    assert on_ranks(ranks(2), work, devices=devices) == [[[True, False]]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_aggregation_none_raises_on_several_ranks(ranks, size):
    """Where there is anything to merge."""

    def work(strategy):
        with strategy.scope():
            metric = Keeps(["none"])
        return merged_values(strategy, metric, [1.0, 2.0])

    if size == 1:
        assert on_ranks(ranks(1), work) == [[[1, 2]]]
        return
    with pytest.raises(ValueError, match=r"keeps/none cannot be merged over replicas: its aggregation is 'none'"):
        on_ranks(ranks(2), work)


def test_merge_in_local_only_returns_own_state(ranks):
    def work(strategy):
        with strategy.scope():
            metric = Keeps(["sum", "mean", "only_first_replica"])
        strategy.run(lambda: metric.update_state([2.0, 4.0]))
        if strategy.rank:
            return None
        with strategy.extended.local_only():
            return [value.numpy().tolist() for _, value in keras_metrics.merged(metric.variables, strategy.extended)]

    assert on_ranks(ranks(2), work)[0] == [[2, 4]] * 3


def test_extra_numbers_are_summed_in_the_same_collective(ranks):
    """In the collectives that the state takes anyway; a variable that is named twice is merged once."""

    def work(strategy):
        with strategy.scope():
            metric = Keeps(["sum"])
        strategy.run(lambda: metric.update_state([1.0, 2.0]))
        statistics = strategy.extended.group.engine.statistics
        before = statistics.collectives
        numbers = [tf.constant(strategy.rank + 1.0), tf.constant([2.0, 3.0])]
        pairs, sums = keras_metrics.merged_beside(metric.variables * 2, numbers, strategy.extended)
        return (
            [value.numpy().tolist() for _, value in pairs],
            [total.numpy().tolist() for total in sums],
            statistics.collectives - before,
        )

    assert on_ranks(ranks(2), work) == [([[2.0, 4.0]], [3.0, [4.0, 6.0]], 1)] * 2


def test_a_models_results_are_over_all_replicas_and_its_state_stays(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
        data = tf.data.Dataset.from_tensor_slices((np.zeros((4, 1)), np.arange(4.0)[:, np.newaxis]))
        model.evaluate(data.batch(2), verbose=0)
        (mae,) = (metric for metric in keras_metrics.all_metrics(model) if metric.name == "mae")
        local_state = [copy.numpy() for copy in mae.variables]
        results = [float(model.get_metrics_result()["mae"]) for _ in range(2)]
        np.testing.assert_array_equal([copy.numpy() for copy in mae.variables], local_state)
        return results

    assert on_ranks(ranks(2), work) == [[1.5, 1.5]] * 2


class Nested(keras.Model):
    """A metric that `Model.metrics` does not name, in a layer's metric."""

    def __init__(self):
        super().__init__()
        self.own = keras.metrics.Mean(name="own")
        self.body = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        self.body.found = keras.metrics.Mean(name="of a layer")
        self.own.inner = keras.metrics.Mean(name="inner")

    def call(self, x):
        return self.body(x)


def test_all_metrics_of_a_model_are_found_once(ranks):
    with Ranked(ranks(1).groups[0]).scope():
        model = Nested()
        model.compile("sgd", "mse", metrics=["mae"])
    model.evaluate(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0)
    names = [metric.name for metric in keras_metrics.all_metrics(model)]
    assert len(names) == len(set(names))
    assert {"own", "inner", "of a layer", "loss"} <= set(names)


UPDATES = {
    "adds": (lambda variable, x: variable.assign(variable + tf.reduce_sum(x)), None),
    "adds several": (lambda variable, x: variable.assign(variable + x[0] + x[1]), None),
    "adds by itself": (lambda variable, x: variable.assign_add(x[0]), None),
    "subtracts": (lambda variable, x: variable.assign(variable - x[0]), None),
    "takes the maximum": (lambda variable, x: variable.assign(tf.maximum(variable, x[0])), "max"),
    "takes the minimum": (lambda variable, x: variable.assign(tf.minimum(tf.reduce_min(x), variable)), "min"),
    "sets": (lambda variable, x: variable.assign(x[0] * 2), "sum"),
    "sets a constant": (lambda variable, x: variable.assign(tf.zeros([])), None),
    "sets a sum": (lambda variable, x: variable.assign(x[0] + x[1] + tf.reduce_sum(x)), "sum"),
    "adds a difference from itself": (lambda variable, x: variable.assign(variable + (x[0] - variable) * 0.1), "sum"),
    "adds itself": (lambda variable, x: variable.assign(variable + variable.value), "sum"),
    "is subtracted": (lambda variable, x: variable.assign(x[0] - variable), "sum"),
    "adds by itself what depends on it": (lambda variable, x: variable.assign_add((x[0] - variable) / 2), "sum"),
    "multiplies": (lambda variable, x: variable.assign(variable * x[0]), "sum"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_tells_how_a_variable_is_updated(ranks, caplog, name):
    """And is told if its parts on all replicas may not add up."""
    update, expected = UPDATES[name]
    strategy = Ranked(ranks(1).groups[0])

    class Kept(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="kept")
            self.kept = self.add_variable((), "zeros", name="kept")

        def result(self):
            return self.kept.value

    with strategy.scope():
        variable = Kept().kept
    assigned = []

    @functools.partial(tf.function, autograph=False)  # as Keras's steps are
    def step(x):
        def replica():
            noted = Assigned()
            with noted.noted():
                update(variable, x)
            assigned.extend(noted.values[id(variable)])
            keras_metrics.infer_merge_rule(variable, assigned)

        in_step(strategy, 1, 1, replica)

    step(tf.constant([1.0, 2.0]))
    assert getattr(variable, MERGED_BY, None) == expected
    assert ("is overwritten in a step, not added to" in caplog.text) == (expected == "sum")


def test_results_are_known_by_their_tensors(ranks):
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        mean, f_score = keras.metrics.Mean(), keras.metrics.F1Score()
    mean.update_state(2.0)
    results = keras_metrics.Results()
    with results.of([mean, f_score]):
        tensor = mean.result()
        assert results.whose(tensor) == (mean, ())
        assert results.whose(tf.identity(tensor)) is None
    assert "result" not in vars(mean)
    assert results.whose(tensor) == (mean, ())
    assert results.whose(mean.result()) is None
