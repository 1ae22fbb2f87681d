import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedLocal
from tfdist.errors import MismatchError
from tfdist.private import tensorflow as private


def test_all_reduce_in_step_raises_unless_own_process_only(ranks):
    """What tfdist reduces by itself; a user's reduction over all replicas is an error, as there is none in a step."""

    def work(group):
        strategy = RankedLocal(group)

        def replica(options=None):
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0 + group.rank), options)

        with pytest.raises(ValueError, match="all_reduce in a step: under RankedLocal each process takes its steps on"):
            strategy.run(replica)
        local_sum = strategy.run(replica, args=(private.OwnOptions(),))
        return float(local_sum), float(strategy.reduce("SUM", local_sum, axis=None)), strategy.num_replicas_in_sync

    assert ranks(2)(work) == [(1.0, 3.0, 2), (2.0, 3.0, 2)]


def test_variables_start_with_values_of_rank_zero(ranks):
    def work(group):
        with RankedLocal(group).scope():
            return keras.Variable(np.full(2, group.rank), name="v").numpy().tolist()

    assert ranks(2)(work) == [[0, 0], [0, 0]]


def test_optimizer_variables_are_per_process(ranks):
    def work(group):
        strategy = RankedLocal(group)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
            model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
            model.optimizer.build(model.trainable_variables)
        extended = strategy.extended
        ids = {id(variable) for variable in extended.per_process_variables(model)}
        averages = extended.moving_averages(model)
        assert len(averages) == 2
        assert all(id(variable) in ids for variable in (*averages, *model.optimizer.variables, *inner.variables))
        return True

    assert ranks(1)(work) == [True]


def test_different_arguments_are_an_error(ranks):
    with pytest.raises(MismatchError, match="rounds of strategy 0: sync_every="):
        ranks(2)(lambda group: RankedLocal(group, described=f"sync_every={group.rank}"))
