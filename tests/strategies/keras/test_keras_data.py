import contextlib
import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist.private import tensorflow as private
from tfdist.strategies.keras import keras_data
from tfdist.strategies.step_calls import StepCalls


def test_one_replica_reads_what_plain_keras_reads(strategy):
    """TensorFlow's iterators over devices cost more than a small step."""
    data = tf.data.Dataset.from_tensors(tf.ones([2, 3]))
    with strategy.extended.reading_for_keras(StepCalls()):
        assert isinstance(strategy.experimental_distribute_dataset(data), tf.data.Dataset)
    assert isinstance(strategy.experimental_distribute_dataset(data), tf.distribute.DistributedDataset)


class Batches(keras.utils.PyDataset):
    """Batches that are their own number."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.full((2, 1), index, np.float32), np.zeros((2, 1), np.float32)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_ranks_read_the_batches_of_a_py_dataset_in_one_order(ranks, workers):
    """Another one in each epoch."""

    def work(strategy):
        seen = []

        class Seen(keras.Sequential):
            def train_step(self, data):
                seen.append(data[0])
                return super().train_step(data)

        with strategy.scope():
            model = Seen([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        model.fit(Batches(workers=workers), epochs=2, verbose=0)
        return [int(batch[0, 0]) for batch in seen]

    first, second = on_ranks(ranks(2), work)
    assert first == second
    assert sorted(first[:8]) == list(range(8))
    assert first[:8] != first[8:]


def test_py_datasets_are_shuffled_as_in_plain_keras(strategy):
    """Another order in each `fit`, after one seed; what else the program draws is the same, too."""

    def orders(scope):
        keras.utils.set_random_seed(3)
        seen = []

        class Noted(Batches):
            def __getitem__(self, index):
                seen.append(index)
                return super().__getitem__(index)

        with scope:
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(Noted(), verbose=0)
        model.fit(Noted(), epochs=2, verbose=0)
        return seen, random.random()

    try:
        plain = orders(contextlib.nullcontext())
        assert orders(strategy.scope()) == plain
        assert plain[0][-24:-16] != plain[0][-16:-8]
    finally:
        private.context.set_global_seed(None)


def test_shuffling_generator_is_set_per_thread():
    """Others by the module, as ever."""

    class Owner:
        pass

    owner, expected, generators = Owner(), random.Random(5).random(), []
    setattr(owner, keras_data._ORDER, random.Random(5))
    own_module = keras_data._random
    with own_module.of(owner):
        thread = threading.Thread(target=lambda: generators.append(own_module.generator))
        thread.start()
        thread.join()
        assert own_module.random() == expected
    assert generators == [random]
    assert own_module.generator is random
    with own_module.of(Owner()):
        assert own_module.generator is random


@pytest.mark.parametrize("seed", [None, 7])
def test_shuffling_uses_global_seed_or_random_draw(strategy, seed):
    """TensorFlow's generators stay as they were; a seed of the user's operation counts for more."""
    tf.random.set_seed(seed) if seed is not None else private.context.set_global_seed(None)
    try:
        with keras_data._shuffling_alike(strategy.extended) as first:
            orders = [tf.random.shuffle(tf.range(20)).numpy().tolist() for _ in range(2)]
        with keras_data._shuffling_alike(strategy.extended) as second:
            pass
        assert first.getstate() == second.getstate() == random.getstate()
        assert orders[0] != orders[1]
        assert all(sorted(order) == list(range(20)) for order in orders)
        assert private.global_seed() == seed
    finally:
        private.context.set_global_seed(None)


def test_replaced_shuffle_affects_only_the_calling_thread(strategy):
    private.context.set_global_seed(None)
    original, shapes = tf.random.shuffle, []
    with keras_data._shuffling_alike(strategy.extended):
        assert tf.random.shuffle is not original
        thread = threading.Thread(target=lambda: shapes.append(tf.random.shuffle(tf.range(3)).shape.as_list()))
        thread.start()
        thread.join()
        assert tf.random.shuffle(tf.ones([4, 2])).shape == (4, 2)
        assert sorted(tf.random.shuffle(tf.range(3), seed=1).numpy()) == [0, 1, 2]
    assert tf.random.shuffle is original
    assert shapes == [[3]]


def test_distributed_datasets_are_taken_by_fit_and_evaluate(ranks):
    """With a last batch of one row, which both ranks would train on if it were not shared by samples."""

    def work(strategy):
        x = np.arange(9, dtype=np.float32)[:, None]
        data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
        results = []
        for given in (data, strategy.experimental_distribute_dataset(data)):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
                model.compile(keras.optimizers.SGD(0.01), "mse")
            history = model.fit(given, epochs=2, validation_data=given, verbose=0).history
            (weight, _), loss = model.get_weights(), model.evaluate(given, verbose=0)
            results.append([weight.item(), *history["loss"], *history["val_loss"], loss])
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
        return results[0]

    first, second = on_ranks(ranks(2), work)
    np.testing.assert_allclose(first, second)


class Samples(keras.metrics.Metric):
    """The number of samples, and their sum."""

    def __init__(self):
        super().__init__(name="samples")
        self.sums = self.add_variable((2,), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add(
            tf.stack([tf.cast(tf.size(y_true), tf.float32), tf.cast(tf.reduce_sum(y_true), tf.float32)])
        )

    def result(self):
        return {"count": self.sums[0], "sum": self.sums[1]}


def own_rows(strategy, folder):
    """With `AutoShardPolicy.OFF`: nine samples of each process's own."""
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    x = np.arange(9.0)[:, None] + 9 * strategy.rank
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(4).with_options(off)


def files_of_different_lengths(strategy, folder):
    """Each process reads one of them; the number of batches is that of both."""
    for name, numbers in (("a", range(14)), ("b", range(14, 18))):
        if strategy.rank == 0:
            (folder / name).write_text("\n".join(map(str, numbers)))
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))  # they are there
    names = tf.data.Dataset.from_tensor_slices([str(folder / name) for name in "ab"])
    numbers = tf.data.TextLineDataset(names).map(lambda line: tf.strings.to_number(line)[None])
    return numbers.map(lambda x: (x, x)).batch(6).apply(tf.data.experimental.assert_cardinality(3))


def one_file(strategy, folder):
    """Processes have parts of its batches."""
    if strategy.rank == 0:
        (folder / "a").write_text("\n".join(map(str, range(18))))
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))  # it is there
    numbers = tf.data.TextLineDataset(str(folder / "a")).map(lambda line: tf.strings.to_number(line)[None])
    return numbers.map(lambda x: (x, x)).batch(6)


@pytest.mark.parametrize("make", [own_rows, files_of_different_lengths, one_file])
def test_every_sample_of_shards_counts(ranks, make, tmp_path):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Samples()])
        data = make(strategy, tmp_path)
        history = model.fit(data, epochs=2, verbose=0).history
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
        return [*zip(history["count"], history["sum"], strict=True), (evaluated["count"], evaluated["sum"])]

    for results in on_ranks(ranks(2), work):
        assert results == [(18, sum(range(18)))] * 3
