"""The strategy on one process."""

import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies.step_calls import StepCalls


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_single_process_has_rank_zero_and_size_one():
    strategy = tfdist.AllReduceStrategy()
    assert (strategy.rank, strategy.size, strategy.local_rank) == (0, 1, 0)
    assert strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
    assert strategy.communication()["messages"] == strategy.communication()["bytes"] == 0
    assert strategy.extended.should_checkpoint
    assert strategy.extended.should_save_summary
    assert isinstance(strategy, tf.distribute.Strategy)


def test_bad_arguments():
    with pytest.raises(ValueError, match="expects a list of devices, such as"):
        tfdist.AllReduceStrategy(devices=[])
    with pytest.raises(ValueError, match=r"expected a device of this process; got 'GPU:7'. Choose from CPU:0"):
        tfdist.AllReduceStrategy(devices=["CPU:0", "GPU:7"])
    with pytest.raises(ValueError, match="must name each device once; got"):
        tfdist.AllReduceStrategy(devices=["CPU:0", "cpu:0"])
    with pytest.raises(ValueError, match=r"algorithm must be one of ring, .*; got 'rings'"):
        tfdist.AllReduceStrategy(algorithm="rings")


def test_resolver_without_a_task():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({"worker": ["a:1", "b:1"]}))
    with pytest.raises(tfdist.ClusterSpecError, match="not this process's own task"):
        tfdist.AllReduceStrategy(cluster_resolver=resolver)


def test_resolver_of_one_task():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0
    )
    strategy = tfdist.AllReduceStrategy(cluster_resolver=resolver)
    assert strategy.cluster_resolver is resolver
    assert strategy.size == 1


def test_models_of_other_strategies_are_left_alone():
    """The seams are installed for the process; a model that was built without tfdist must not notice."""
    import keras
    import numpy as np

    tfdist.AllReduceStrategy()
    for strategy in (None, tf.distribute.MirroredStrategy(["CPU:0"])):
        scope = strategy.scope() if strategy else tf.init_scope()
        with scope:
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
            model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(np.ones((20, 4)), np.ones((20, 2)), batch_size=5, epochs=2, verbose=0).history
        assert len(history["loss"]) == 2
        assert model.predict(np.ones((7, 4)), verbose=0).shape == (7, 2)
        assert len(model.evaluate(np.ones((7, 4)), np.ones((7, 2)), verbose=0)) == 2
        assert np.isfinite(model.train_on_batch(np.ones((3, 4)), np.ones((3, 2)))).all()
        assert "loss" in model.train_on_batch(np.ones((3, 4)), np.ones((3, 2)), None, None, True)


def test_datasets_are_not_tuned_unless_the_user_asks_for_it():
    """Deleting an iterator would wait for its autotuner's next run, which may take as long as the epoch."""
    strategy = tfdist.AllReduceStrategy()
    tuned = tf.data.Options()
    tuned.autotune.enabled = True
    plain = tf.data.Dataset.range(8).batch(4)
    for dataset, enabled in ((plain, False), (plain.with_options(tuned), True)):
        for distributed in (
            strategy.experimental_distribute_dataset(dataset),
            strategy.distribute_datasets_from_function(lambda context, dataset=dataset: dataset),
        ):
            iterator = iter(distributed)._iterators[0]
            assert iterator._dataset.options().autotune.enabled is enabled
        with strategy.extended.reading_for_keras(StepCalls()):
            read_by_keras = strategy.experimental_distribute_dataset(dataset)
        assert read_by_keras.options().autotune.enabled is enabled
