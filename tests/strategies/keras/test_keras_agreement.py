import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, RankedLocal, on_ranks
from tfdist.errors import MismatchError
from tfdist.strategies.keras import keras_agreement

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[:2], Y[:2]


class Counting(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


def lines(tmp_path):
    path = tmp_path / "lines"
    path.write_text("1\n2\n")
    return tf.data.TextLineDataset([str(path)]).batch(2)


def test_descriptions_name_kind_and_size_of_data(ranks, tmp_path):
    described = functools.partial(keras_agreement._described, processes=1)
    assert described(None) == "None"
    assert described(X) == described({"a": X, "b": Y}) == described((None, tf.constant(X))) == "arrays of 8 rows"
    assert described(np.float32(3)) == "arrays of 1 rows"
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    assert described(dataset) == "a tf.data.Dataset of 4 batches"
    assert described(dataset.repeat()) == "a tf.data.Dataset of infinitely many batches"
    assert described(dataset.filter(lambda x: True)) == "a tf.data.Dataset of an unknown number of batches"
    assert described(lines(tmp_path)) == "a tf.data.Dataset of which each process reads a part"
    assert described(lines(tmp_path), in_order=True).startswith("a tf.data.Dataset of an unknown number")
    assert described(Batches()) == "a PyDataset of 4 batches"
    assert described(x for x in X) == "a generator"

    def work(strategy):
        shared = strategy.experimental_distribute_dataset(dataset)
        per_rank = strategy.distribute_datasets_from_function(lambda context: dataset.take(1 + strategy.rank))
        return described(shared), described(per_rank)

    assert on_ranks(ranks(2), work) == [("a distributed dataset of 4 batches", "a dataset of each process's own")] * 2


@pytest.mark.parametrize("strategy", [Ranked, RankedLocal])
def test_different_data_are_an_error_and_the_next_call_works(ranks, strategy):
    def work(group):
        instance = strategy(group)
        with instance.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        rows = 6 + 2 * group.rank
        with pytest.raises(MismatchError) as caught:
            model.fit(X[:rows], Y[:rows], verbose=0)
        model.fit(X, Y, verbose=0)
        return str(caught.value)

    for rank, said in enumerate(ranks(2)(work)):
        assert said.startswith(
            f"rank {rank}: fit was called with different arguments on different ranks: x: arrays of 6 rows on rank(s) "
            "[0], arrays of 8 rows on rank(s) [1]. Call `fit` with the same data"
        )


def test_different_weights_of_classes_are_an_error(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with pytest.raises(MismatchError, match=r"class_weight: \{0: 1, 1: 1\} on rank\(s\) \[0\], \{0: 1, 1: 2\} on"):
            model.fit(X, Y, class_weight={0: 1, 1: 1 + strategy.rank}, verbose=0)
        return True

    assert on_ranks(ranks(2), work) == [True] * 2


def test_callbacks_and_verbosity_may_differ_between_ranks(ranks):
    """Callbacks, `verbose`, an evaluation by one rank of what only it has, and data of their own."""

    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        callbacks = [keras.callbacks.History()] * strategy.rank
        model.fit(
            X, Y, batch_size=32 if strategy.rank else None, verbose=0 if strategy.rank else "auto", callbacks=callbacks
        )
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
        distributed = strategy.distribute_datasets_from_function(lambda context: data.take(1 + strategy.rank))
        batches = []
        model.fit(distributed, verbose=0, callbacks=[Counting(batches)])
        return batches

    assert on_ranks(ranks(2), work) == [[0, 1]] * 2


def test_long_values_are_shown_from_where_they_differ():
    same = ", ".join(f"dense_{number}/kernel" for number in range(100))
    said = keras_agreement.by_value([f"{same}, a/bias, c", f"{same}, b/bias, c", f"{same}, a/bias, c"], [0, 3, 5])
    assert said == "… a/bias, c on rank(s) [0, 5], … b/bias, c on rank(s) [3]"
    shorter = keras_agreement.by_value([same, same + ", more"], [0, 1])
    assert shorter == "… dense_99/kernel on rank(s) [0], … dense_99/kernel, more on rank(s) [1]"


@pytest.mark.parametrize(("strategy", "counted"), [(Ranked, [8, 8]), (RankedLocal, [8, 4])])
def test_data_that_each_process_has_made_end_without_a_step_more(ranks, strategy, counted):
    """In each of two epochs, if all lengths are known; the longest counts where processes take each step together."""

    def work(group):
        made = strategy(group)
        with made.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile(keras.optimizers.SGD(0.1, weight_decay=0.1), "mse")
        whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
        own = whole.take(4 - 2 * group.rank)
        data = made.distribute_datasets_from_function(lambda context: own)
        model.fit(data, validation_data=data, epochs=2, verbose=0)
        return int(model.optimizer.iterations)

    assert ranks(2)(work) == counted


@pytest.mark.parametrize("strategy", [Ranked, RankedLocal])
@pytest.mark.parametrize("is_known", [True, False])
def test_predictions_of_unequal_data_are_those_of_all_processes(ranks, strategy, is_known):
    def work(group):
        made = strategy(group)
        with made.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        own = tf.data.Dataset.from_tensor_slices(X).batch(2).take(4 - 3 * group.rank)
        data = made.distribute_datasets_from_function(lambda context: own if is_known else own.filter(lambda x: True))
        return model.predict(data, verbose=0).shape

    assert ranks(2)(work) == [(10, 1)] * 2


def test_data_of_which_one_process_does_not_know_the_length_end_when_all_have_none(ranks):
    def work(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile("sgd", "mse")
        whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
        own = whole.filter(lambda x, y: True) if strategy.rank else whole.take(2)
        counted = Counting([])
        data = strategy.distribute_datasets_from_function(lambda context: own)
        model.fit(data, verbose=0, callbacks=[counted])
        return len(counted.batches)

    assert on_ranks(ranks(2), work) == [4, 4]
