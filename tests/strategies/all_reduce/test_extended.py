import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.strategies.ranked import Ranked, on_ranks
from tfdist import compression as c
from tfdist.errors import MismatchError
from tfdist.strategies.all_reduce import extended
from tfdist.strategies.step_calls import StepCalls

DTYPES = [
    tf.float16, tf.float32, tf.int64, tf.bool,
    tf.string,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_variables_begin_with_the_chiefs_value(ranks, dtype):
    def work(strategy):
        with strategy.scope():
            element = {tf.string: "rank", tf.bool: False}.get(dtype, strategy.rank + 3)
            value = tf.cast([element, element], dtype) if dtype != tf.string else tf.constant([f"{strategy.rank}"] * 2)
            return tf.Variable(value).numpy().tolist(), tf.Variable(lambda: value).numpy().tolist()

    for values in on_ranks(ranks(2), work):
        assert values == ({tf.string: [b"0"] * 2, tf.bool: [False] * 2}.get(dtype, [3, 3]),) * 2


def test_variables_that_a_function_makes_begin_with_the_chiefs_value_too(ranks):
    def work(strategy):
        made = []

        @tf.function
        def function():
            if not made:
                made.append(tf.Variable(lambda: tf.fill([2], float(strategy.rank + 1)), shape=[2]))
            return made[0].read_value()

        with strategy.scope():
            return strategy.run(function).numpy().tolist()

    assert on_ranks(ranks(2), work) == [[1, 1]] * 2


def test_variable_shapes_that_differ_between_ranks_raise(ranks):
    def work(strategy):
        with strategy.scope():
            tf.Variable(tf.zeros([3 + strategy.rank]), name="kernel")

    with pytest.raises(MismatchError, match=r"variable 0: kernel float32 \(\d,\), kernel float32 \(\d,\)"):
        on_ranks(ranks(2), work)


def test_alone_a_rank_makes_its_own_variables(ranks):
    def work(strategy):
        with strategy.scope(), strategy.extended.local_only():
            return float(tf.Variable(float(strategy.rank)))

    assert on_ranks(ranks(2), work) == [0.0, 1.0]


def test_settings_that_differ_between_ranks_raise(ranks):
    def work(group):
        Ranked(group, [None, c.TopK(0.1)][group.rank])

    with pytest.raises(MismatchError, match=r"settings of strategy 0: 1 device\(s\), the algorithm ring .*TopK"):
        ranks(2)(work)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_know_their_ids_and_the_writer(ranks, size):
    def work(strategy):
        extended = strategy.extended
        contexts = []
        strategy.distribute_datasets_from_function(lambda context: contexts.append(context) or tf.data.Dataset.range(3))
        values = strategy.experimental_distribute_values_from_function(
            lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
        )
        return {
            "replicas": (strategy.num_replicas_in_sync, extended.has_several_replicas),
            "id": int(strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)),
            "writes": (extended.is_writer, extended.should_checkpoint, extended.should_save_summary),
            "reads": (contexts[0].input_pipeline_id, contexts[0].num_input_pipelines),
            "values": strategy.experimental_local_results(values),
            "failure": extended.failure,
        }

    for rank, result in enumerate(on_ranks(ranks(size), work)):
        assert result == {
            "replicas": (size, size > 1),
            "id": rank,
            "writes": (rank == 0,) * 3,
            "reads": (rank, size),
            "values": ((rank, size),),
            "failure": None,
        }


def test_reduce_sums_and_averages_replica_results(ranks):
    def work(strategy):
        per_replica = strategy.run(lambda: tf.constant([strategy.rank + 1.0, 2.0]))
        return [
            strategy.reduce("SUM", per_replica, axis=None).numpy().tolist(),
            strategy.reduce("MEAN", per_replica, axis=None).numpy().tolist(),
            strategy.reduce("SUM", per_replica, axis=0).numpy().tolist(),
        ]

    assert on_ranks(ranks(2), work) == [[[3.0, 4.0], [1.5, 2.0], 7.0]] * 2


def test_mirrored_value_allows_mean_and_refuses_sum(ranks):
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        variable = tf.Variable(3.0)
    assert strategy.reduce("MEAN", variable, axis=None).numpy() == 3.0
    with pytest.raises(ValueError, match=r"the same on all replicas cannot be summed over them; use ReduceOp\.MEAN"):
        strategy.reduce("SUM", variable, axis=None)


def test_in_local_only_nothing_is_communicated(ranks):
    """Rank 1 does not come."""
    both = ranks(2)

    def work(group):
        strategy = Ranked(group)
        with strategy.scope():
            metric = keras.metrics.Sum()
        metric.update_state(5.0)
        if group.rank:
            return None
        with strategy.extended.local_only(), strategy.extended.local_only():
            assert strategy.extended.is_local_only
            results = [strategy.reduce(op, tf.constant(3.0), axis=None).numpy() for op in ("SUM", "MEAN")]
        assert not strategy.extended.is_local_only
        return results

    assert both(work)[0] == [3.0, 3.0]


@pytest.mark.parametrize("steps", [[(1, 4), (1, 3)], [(1, 1), (0, 0)], [(0, 0), (0, 0)]])
def test_a_step_is_counted_over_all_ranks(ranks, steps):
    """Who has another batch, and how many samples they have together."""

    def work(strategy):
        filled, samples = steps[strategy.rank]
        optionals = [tf.experimental.Optional.from_value(tf.zeros([samples, 2]))] if filled else [
            tf.experimental.Optional.empty(tf.TensorSpec([None, 2]))
        ]  # fmt: skip
        count = tf.function(strategy.extended.count)(optionals)
        return int(count), int(strategy.extended.shares.total())

    expected = tuple(np.sum(steps, axis=0))
    assert on_ranks(ranks(2), work) == [expected] * 2


def test_variables_convert_to_float_and_int(ranks):
    """As Keras expects of them."""
    strategy = Ranked(ranks(1).groups[0])
    with strategy.scope():
        variables = [
            tf.Variable(2.5),
            tf.Variable(
                2.5, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
            ),
        ]
    assert [(float(variable), int(variable)) for variable in variables] == [(2.5, 2)] * 2


def test_datasets_for_each_replica_are_made_by_functions(ranks):
    strategy = Ranked(ranks(1).groups[0])
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    with pytest.raises(ValueError, match=r"PER_REPLICA is not supported.*call distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2), options)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(context.num_input_pipelines), options
    )
    assert [int(value) for value in distributed] == [0]


@pytest.mark.parametrize("name", ["reading_for_keras", "reading_in_order"])
def test_reading_mode_ends_with_its_context(ranks, name):
    """Also when that ends by an error."""
    extended = Ranked(ranks(1).groups[0]).extended
    given = [StepCalls()] if name == "reading_for_keras" else []
    flag = {"reading_for_keras": "_reads_for_keras", "reading_in_order": "_reads_in_order"}[name]
    seen = []

    def read():
        with getattr(extended, name)(*given):
            seen.append(getattr(extended, flag))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert seen == (given or [True])
    assert not getattr(extended, flag)


def test_strategies_do_not_share_the_numbers_of_tensorflows_collectives(monkeypatch):
    """Which TensorFlow uses between GPUs, and binds to a shape."""
    monkeypatch.setattr(extended, "_on_cpu", lambda devices: False)
    for width in (4, 9):
        with tfdist.AllReduceStrategy(devices=["CPU:0", "CPU:1"]).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width)])
            model.compile("sgd", "mse")
        history = model.fit(np.ones((8, 3)), np.zeros((8, width)), epochs=2, verbose=0).history
        assert history["loss"][1] < history["loss"][0]
