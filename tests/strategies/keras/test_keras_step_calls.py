"""Steps have the collectives that the callbacks of any rank need, and no others."""

import collections
import functools
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards, on_ranks
from tests.sweeps import some, sweep
from tfdist.compression import Int8, by_name
from tfdist.engine.host_calls import host_call
from tfdist.errors import MismatchError
from tfdist.strategies.all_reduce.sharded_extended import ShardedExtended
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.keras.keras_step_calls import may_end_steps, reads_logs_of_steps

ROWS = np.random.default_rng(0).normal(size=(18, 2)).astype(np.float32)
X, Y = ROWS[:8], ROWS[:8, :1]


def model_in(strategy, metrics=("mae",), kind=keras.Model):
    """A model, in which a stand-in row or an uneven share would be noticed.

    A rank alone is eager, as it would trace longer than it trains.
    """
    with strategy.scope():
        inputs = keras.Input((2,))
        model = kind(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        model.compile("sgd", "mse", metrics=list(metrics), run_eagerly=strategy.num_replicas_in_sync == 1)
    return model


class Batches(keras.utils.PyDataset):
    """The rows, without the last batch on some ranks.

    Args:
        x: inputs.
        y: labels.
        missing: rows of the last batch.
    """

    def __init__(self, x, y, missing=0):
        super().__init__()
        self.x, self.y, self.missing = x, y, missing

    def __len__(self):
        return -(-len(self.x) // 4)

    def __getitem__(self, index):
        rows = slice(4 * index, min(4 * index + 4, len(self.x) - self.missing))
        return self.x[rows], self.y[rows]


class OnTestBatches(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


class OnBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class OnEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


class Saves(keras.callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)


@pytest.mark.parametrize(
    ("callback", "may"),
    [
        (keras.callbacks.History(), False),
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.ModelCheckpoint("a.keras", save_freq=2), False),
        (keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate), False),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), False),
        (OnEpochs(), False),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (keras.callbacks.LambdaCallback(on_epoch_begin=print), False),
        (OnBatches(), True),
        (Saves("a.keras"), True),
        (types.SimpleNamespace(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_may_end_steps_detects_callbacks_with_batch_hooks(callback, may):
    assert may_end_steps(callback) is may


@pytest.mark.parametrize(
    ("callback", "reads"),
    [
        (keras.callbacks.History(), False),
        (keras.callbacks.ProgbarLogger(), False),
        (keras.callbacks.ModelCheckpoint("a.keras"), False),
        (keras.callbacks.TensorBoard("a"), False),
        (keras.callbacks.CSVLogger("a"), False),
        (keras.callbacks.BackupAndRestore("a", save_freq=2), False),
        (keras.callbacks.LambdaCallback(on_epoch_end=print, on_train_batch_begin=print), False),
        (OnEpochs(), False),
        (keras.callbacks.ModelCheckpoint("a.keras", save_freq=2), True),
        (keras.callbacks.TensorBoard("a", update_freq="batch"), True),
        (keras.callbacks.TensorBoard("a", update_freq=10), True),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras.callbacks.LambdaCallback(on_test_batch_end=print), True),
        (OnBatches(), True),
        (OnTestBatches(), True),
        (Saves("a.keras"), True),
        (types.SimpleNamespace(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reads_logs_of_steps_detects_callbacks_with_batch_logs(callback, reads):
    assert reads_logs_of_steps(callback) is reads


def as_dataset(x, y, rows=4):
    """Batches; of arrays, Keras traces functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)


DATA = {
    "arrays": lambda: {"x": ROWS, "y": ROWS[:, :1], "batch_size": 4},
    "a dataset": lambda: {"x": as_dataset(ROWS, ROWS[:, :1])},
    "a dataset without an end": lambda: {"x": as_dataset(ROWS, ROWS[:, :1]).repeat(), "steps_per_epoch": 5},
    "a PyDataset": lambda: {"x": Batches(ROWS, ROWS[:, :1])},
    "a generator": lambda: {"x": (batch for batch in itertools.repeat((X, Y))), "steps_per_epoch": 5},
    "a filtered dataset": lambda: {"x": as_dataset(ROWS, ROWS[:, :1]).filter(lambda x, y: True)},
}
KNOWN = [name for name in DATA if name not in ("a generator", "a filtered dataset")]


def collectives_of_steps(strategy, given, callbacks=(), model=None):
    """How many collectives each step has, as the difference between two epochs and one."""
    model, statistics, counts = model or model_in(strategy), strategy.extended.group.engine.statistics, []
    for epochs in (1, 1, 2):
        before = statistics.collectives
        model.fit(**given(), epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
        counts.append(statistics.collectives - before)
    an_epoch = counts[2] - counts[1]
    return an_epoch // 5, an_epoch % 5


@pytest.mark.parametrize("names", [[*DATA][::2], sweep([*DATA][1::2])], ids=", ".join)
def test_steps_sum_gradients_and_nothing_else_where_batches_are_known(ranks, names):
    def work(strategy):
        model = model_in(strategy)
        return {name: collectives_of_steps(strategy, DATA[name], model=model) for name in names}

    for found in on_ranks(ranks(2), work):
        assert {name: calls for name, (calls, _) in found.items()} == {name: 1 + (name not in KNOWN) for name in names}
        assert all(at_the_end <= 3 for _, at_the_end in found.values()), found


def batch_normalization(**options):
    return [keras.layers.Dense(3, kernel_initializer="ones"), keras.layers.BatchNormalization(**options)]


def masks():
    """Returns layers that mask the first step of the last rows; unequal shares have different numbers of steps."""
    reshaped = [keras.layers.Reshape((2, 1)), keras.layers.Masking(mask_value=ROWS[-1, 0])]
    return [*reshaped, keras.layers.Dense(1, kernel_initializer="ones")]


class Scaled(keras.optimizers.LossScaleOptimizer):
    def __init__(self, **options):
        super().__init__(keras.optimizers.SGD(0.01, **options), initial_scale=8.0, dynamic_growth_steps=3)


MODELS = {
    "loss scaling, BatchNormalization and gradients that are clipped": (
        batch_normalization,
        {"optimizer": lambda: Scaled(global_clipnorm=0.1)},
        1,
    ),
    "BatchNormalization": (batch_normalization, {}, 1),
    "BatchNormalization with gradients that are clipped": (
        batch_normalization,
        {"optimizer": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.1)},
        1,
    ),
    "loss scaling": (list, {"optimizer": Scaled}, 1),
    "synchronized BatchNormalization": (lambda: batch_normalization(synchronized=True), {}, 3),
    "two that are synchronized": (
        lambda: [*batch_normalization(synchronized=True), *batch_normalization(synchronized=True)],
        {},
        5,
    ),
    "masks": (masks, {"weighted_metrics": ["mae"]}, 2),
    "metrics": (list, {"metrics": ["mae", "mse", keras.metrics.RootMeanSquaredError]}, 1),
    "BatchNormalization and loss scaling, compiled by XLA": (
        batch_normalization,
        {"optimizer": Scaled, "jit_compile": True},
        1,
    ),
    "accumulation and loss scaling": (list, {"optimizer": lambda: Scaled(gradient_accumulation_steps=5)}, 1),
}


@pytest.mark.parametrize("name", some(MODELS, 4))
def test_layers_and_optimizers_share_the_collective_of_gradients(ranks, name):
    make, compiled, expected = MODELS[name]

    def work(strategy):
        with strategy.scope():
            last = [] if make is masks else [keras.layers.Dense(1, kernel_initializer="ones")]
            model = keras.Sequential([keras.layers.Input((2,)), *make(), *last])
            given = {key: value() if callable(value) else value for key, value in compiled.items()}
            given = {"optimizer": "sgd", "run_eagerly": strategy.num_replicas_in_sync == 1, **given}
            given["metrics"] = [metric() if isinstance(metric, type) else metric for metric in given.get("metrics", [])]
            model.compile(loss="mse", **given)
        y = ROWS[:, :, None] if make is masks else ROWS[:, :1]
        calls = collectives_of_steps(strategy, lambda: {"x": as_dataset(ROWS, y)}, model=model)
        return calls, model.get_weights(), model.optimizer.variables[-1].numpy()

    results = on_ranks(ranks(2), work)
    updates = 1 if "accumulation" in name else 0  # in an epoch, each with a sum beside the steps' checks of infinities
    for (calls, at_the_end), *_ in results:
        assert (calls, at_the_end <= 3 + updates) == (expected, True), (calls, at_the_end)
    if "BatchNormalization" not in name or "synchronized" in name:
        ((_, *alone),) = on_ranks(ranks(1), work)
        for _, *state in results:
            for want, got in zip(keras.tree.flatten(alone), keras.tree.flatten(state), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


SHARDED = {
    "shard='optimizer'": (ShardedExtended, 2),
    "shard='weights', gather='model'": (functools.partial(WeightPartsExtended, gather="model"), 5),
    "shard='weights'": (WeightPartsExtended, 8),
}
"""By arguments: how often a step of two layers waits for other processes."""


@pytest.mark.parametrize("name", some(SHARDED))
def test_steps_wait_no_more_often_where_parts_are_compressed(ranks, monkeypatch, name):
    """Biases are not compressed: the sum of those that are begins before the step waits for both."""
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)
    extended, waits = SHARDED[name]
    traced = []

    def counted(*arguments, name):
        traced.append(name)
        return host_call(*arguments, name=name)

    def work(group, compression):
        strategy = RankedShards(group, extended, compression)
        with strategy.scope():
            layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
            model = keras.Sequential([keras.layers.Input((2,)), *layers])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(as_dataset(X, Y), shuffle=False, verbose=0)

    monkeypatch.setattr("tfdist.engine.posting.host_call", counted)
    for compression in (None, by_name({"bias": None}, otherwise=Int8())):
        traced.clear()
        ranks(2)(work, compression)
        expected = {"tfdist_finish": 2 * waits, **({"tfdist_post": 2} if compression else {})}
        assert collections.Counter(traced) == expected, "on two ranks"


def test_the_callback_of_one_rank_has_all_ranks_merge_logs_and_count(ranks):
    expected = {OnBatches: 3, OnTestBatches: 2, OnEpochs: 1}

    def work(strategy):
        model = model_in(strategy)
        given = [(kind, [kind()] if strategy.rank else []) for kind in expected]
        data = DATA["a dataset"]
        return {kind: collectives_of_steps(strategy, data, callbacks, model)[0] for kind, callbacks in given}

    assert on_ranks(ranks(2), work) == [expected] * 2


@pytest.mark.parametrize("name", some(KNOWN, 4, first=1))
def test_logs_of_epochs_and_of_evaluations_are_those_of_one_process(ranks, name):
    """The last batch of the 18 rows has two rows: its shares have one row each, or none on the third rank."""

    def work(strategy):
        model = model_in(strategy)
        given = DATA[name]()
        history = model.fit(**given, epochs=2, shuffle=False, verbose=0, validation_data=as_dataset(X, Y)).history
        given.pop("y", None)
        given = {"x": ROWS, "y": ROWS[:, :1], "batch_size": 5} if name == "arrays" else {"x": DATA["a dataset"]()["x"]}
        return history, model.evaluate(**given, return_dict=True, verbose=0), model.get_weights()

    (alone,) = on_ranks(ranks(1), work)
    for results in on_ranks(ranks(3), work):
        for want, got in zip(keras.tree.flatten(alone), keras.tree.flatten(results), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class OfItsOwn(keras.Model):
    """Its steps return one metric of two, so that Keras takes the logs of the last step for those of the epoch."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {"mae": logs["mae"]}

    def test_step(self, data):
        return {"error": super().test_step(data)["mae"]}


def test_logs_of_steps_and_those_other_than_model_metrics_equal_one_process(ranks):
    """Functions are traced where nobody reads logs of steps, anew where a callback does, and then reused."""

    def work(strategy):
        model, logs, seen = model_in(strategy, kind=OfItsOwn), [], []
        reads = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(float(logs["mae"])),
            on_test_batch_end=lambda batch, logs: seen.append(float(logs["error"])),
        )
        data, validation, test = as_dataset(ROWS, ROWS[:, :1]), as_dataset(X, Y), as_dataset(X, Y, rows=3)
        for callbacks in ([], [reads], [], [reads]):
            given = {"callbacks": callbacks, "validation_data": validation}
            history = model.fit(data, shuffle=False, verbose=0, **given).history
            logs += [history, model.evaluate(test, verbose=0, return_dict=True, callbacks=callbacks)]
        return logs, seen

    (alone,) = on_ranks(ranks(1), work)
    assert [list(log) for log in alone[0]] == [["mae", "val_error"], ["error"]] * 4
    assert len(alone[1]) == 2 * (5 + 2 + 3), "batches of training, validation and evaluation"
    for results in on_ranks(ranks(2), work):
        for want, got in zip(keras.tree.flatten(alone), keras.tree.flatten(results), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


class Returns(keras.Model):
    """Its steps return a number that is not a metric's result."""

    def train_step(self, data):
        super().train_step(data)
        return {"rows": tf.reduce_mean(data[0])}


def test_numbers_of_a_step_are_merged_in_it(ranks):
    def work(strategy):
        return model_in(strategy, kind=Returns).fit(as_dataset(ROWS, ROWS[:, :1]), shuffle=False, verbose=0).history

    for history in on_ranks(ranks(2), work):
        np.testing.assert_allclose(history["rows"], [ROWS[16:].mean()], rtol=1e-5)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_batches_with_other_rows_on_one_rank_are_an_error(ranks, method):
    """Nobody has counted them; the epoch ends as if they were equal, and then they are compared."""

    def work(strategy):
        model = model_in(strategy)
        data = Batches(ROWS, ROWS[:, :1], missing=strategy.rank)
        with pytest.raises(MismatchError) as caught:
            getattr(model, method)(data, verbose=0)
        getattr(model, method)(Batches(ROWS, ROWS[:, :1]), verbose=0)
        return str(caught.value)

    for rank, said in enumerate(on_ranks(ranks(2), work)):
        assert said.startswith(
            f"rank {rank}: the batches of an epoch have different numbers of samples on different ranks: "
            "18 on rank(s) [0], 17 on rank(s) [1]. Give every rank the same data"
        )


def test_data_that_end_early_on_one_rank_are_an_error(ranks):
    """As they have fewer batches than they say."""

    def work(strategy):
        data = as_dataset(ROWS[: 18 - 8 * strategy.rank], ROWS[: 18 - 8 * strategy.rank, :1])
        model_in(strategy).fit(data.apply(tf.data.experimental.assert_cardinality(5)), verbose=0)

    with pytest.raises((MismatchError, tf.errors.OpError)) as caught:
        on_ranks(ranks(2), work)
    assert "rank" in str(caught.value)


def test_an_evaluation_in_a_callback_leaves_what_fit_has_agreed_on(ranks):
    """Also where it comes before `fit` makes the function for its validation, whose steps a callback reads."""

    def work(strategy):
        model, seen = model_in(strategy), []

        class Evaluates(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.evaluate(as_dataset(X, Y), verbose=0)

            def on_test_batch_end(self, batch, logs=None):
                seen.append(float(logs["mae"]))

        model.fit(
            as_dataset(ROWS, ROWS[:, :1]),
            shuffle=False,
            verbose=0,
            validation_data=as_dataset(X, Y),
            callbacks=[Evaluates()],
        )
        return seen

    (alone,) = on_ranks(ranks(1), work)
    assert len(alone) == 2
    for errors in on_ranks(ranks(2), work):
        np.testing.assert_allclose(errors, alone, rtol=1e-4)


def test_functions_traced_without_counts_are_not_reused_with_counts(ranks):
    def work(strategy):
        class Stops(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(batch)
                self.model.stop_training = batch == 1

        model, seen = model_in(strategy), []
        for callbacks in ([], [Stops()] if strategy.rank else [OnEpochs()], []):
            model.fit(as_dataset(X, Y, rows=2), shuffle=False, verbose=0, callbacks=callbacks)
        return seen, int(model.optimizer.iterations), model.get_weights()[0].tolist()

    first, second = on_ranks(ranks(2), work)
    assert second[0] == [0, 1]
    assert first[1:] == second[1:]
    assert first[1] == 4 + 2 + 4


@pytest.mark.parametrize("known", [True, False])
def test_a_request_before_an_epoch_ends_it_after_the_first_step(ranks, known):
    """As in plain Keras, and on all ranks, of which one alone has requested it; in no other epoch."""

    def work(strategy):
        class Stops(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                collectives.append(strategy.extended.group.engine.statistics.collectives)
                self.model.stop_training = epoch == 1 and strategy.rank == strategy.extended.group.size - 1

        model, collectives = model_in(strategy), []
        data = as_dataset(X, Y, rows=2)
        data = data if known else data.filter(lambda x, y: True)
        history = model.fit(data, shuffle=False, verbose=0, epochs=3, callbacks=[Stops()])
        return len(history.epoch), collectives, model.get_weights()[0].tolist()

    (alone,) = on_ranks(ranks(1), work)
    first, second = on_ranks(ranks(2), work)
    assert alone[0] == first[0] == second[0] == 2
    assert first[2] == second[2]
    np.testing.assert_allclose(first[2], alone[2], rtol=1e-5)
    if known:
        (of_an_epoch,) = (after - before for before, after in itertools.pairwise(first[1]))
        assert of_an_epoch == 4 + 4, "gradients of steps, and of the epoch: requests, logs, samples and weights"
