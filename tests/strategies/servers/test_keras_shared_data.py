"""`fit` on batches that are dealt out to all workers; the servers are threads of this process."""

import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.serving import DEADLINE
from tests.strategies.served import served
from tests.sweeps import sweep
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronous,
)
from tfdist.strategies.servers import keras_shared_data

SAMPLES, BATCH = 22, 4
BATCHES = 6
"""An epoch's; the last one is smaller."""
X = np.eye(SAMPLES, dtype="float32")


def counting_model(strategy, optimizer=None, model=keras.Model, **options):
    """A model whose weights count how often each sample was in an update, where each gradient is one."""
    with strategy.scope():
        inputs = keras.layers.Input((SAMPLES,))
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
        made = model(inputs, outputs)
        made.compile(optimizer() if optimizer else keras.optimizers.SGD(1.0), minus_sum, **options)
    return made


@keras.saving.register_keras_serializable()
def minus_sum(y_true, y_pred):
    return -tf.reduce_sum(y_pred)


def fit(model, x=X, y=X[:, :1], **options):
    return model.fit(x, y, **{"batch_size": BATCH, "verbose": 0, **options})


def counts(model):
    """How often each sample was in an update."""
    for link in model.distribute_strategy.extended.links(model):
        link.refresh()  # reads the newest values
    return model.get_weights()[0][:, 0]


def pushes(*models):
    return [sum(link.session.pushes for link in model.distribute_strategy.extended.links(model)) for model in models]


def together(*works):
    """Does each work on a thread of its own, and waits for all."""
    failures = []

    def run(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive(), "hangs"
    if failures:
        raise failures[0]


def on_two(mode=Asynchronous(), servers=2, kinds=({}, {}), make=counting_model, **options):  # noqa: B008
    """Trains on two workers; returns how often each sample was in an update, and each worker's number of pushes."""
    with served(workers=2, servers=servers, mode=mode, data="shared") as strategies:
        models = [make(strategy) for strategy in strategies]
        together(
            *(lambda m=m, given=kind: fit(m, **{**options, **given}) for m, kind in zip(models, kinds, strict=True))
        )
        return counts(models[0]), pushes(*models)


class Meeting(keras.callbacks.Callback):
    """Waits in its first step until the other worker has made some."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def on_train_batch_end(self, batch, logs=None):
        assert self.reached.wait(DEADLINE)


class Reaching(keras.callbacks.Callback):
    def __init__(self, meeting, steps):
        super().__init__()
        self.meeting, self.left = meeting, steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.meeting.reached.set()


OPTIONS = {
    "two servers": {},
    "one server": {"servers": 1},
    "three epochs": {"epochs": 3},
    "in order": {"shuffle": False},
    "within batches": {"shuffle": "batch"},
    "bounded": {"mode": BoundedStaleness(0), "epochs": 3},
    "one batch": {"batch_size": SAMPLES, "epochs": 3, "mode": BoundedStaleness(0)},
    "validated": {"validation_data": (X, X[:, :1]), "epochs": 2},
}


IN_SWEEPS = "one server", "three epochs", "within batches"
"""Which others are, too."""


@pytest.mark.parametrize("name", [sweep(name) if name in IN_SWEEPS else name for name in OPTIONS])
def test_every_sample_of_an_epoch_counts_once(name):
    options = OPTIONS[name]
    sample_counts, push_counts = on_two(**options)
    epochs = options.get("epochs", 1)
    np.testing.assert_array_equal(sample_counts, epochs)
    assert sum(push_counts) == epochs * -(-SAMPLES // options.get("batch_size", BATCH)), push_counts


@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 4}, sweep({"run_eagerly": True})], ids=lambda options: next(iter(options))
)
def test_every_sample_counts_once_however_steps_are_run(options):
    sample_counts, push_counts = on_two(make=lambda strategy: counting_model(strategy, **options), epochs=2)
    np.testing.assert_array_equal(sample_counts, 2)
    assert sum(push_counts) == 2 * BATCHES


def test_single_worker_gets_every_sample():
    with served(data="shared") as (strategy,):
        model = counting_model(strategy)
        fit(model, epochs=2)
        fit(model)
        np.testing.assert_array_equal(counts(model), 3)


def test_a_fast_worker_takes_what_a_slow_one_leaves():
    meeting = Meeting()
    kinds = ({"callbacks": [Reaching(meeting, BATCHES - 2)]}, {"callbacks": [meeting]})
    sample_counts, push_counts = on_two(kinds=kinds)
    np.testing.assert_array_equal(sample_counts, 1)
    assert push_counts == [BATCHES - 2, 2] or push_counts == [BATCHES - 1, 1]


@pytest.mark.parametrize("mode", [Synchronous(), Synchronous(backup_workers=1), SoftSync()], ids=str)
@pytest.mark.parametrize("batch_size", [BATCH, sweep(SAMPLES)])
def test_rounds_end_where_batches_do_not_divide(mode, batch_size):
    """In the last round of an epoch some workers have no batch. With backup workers, some pushes are dropped."""
    sample_counts, push_counts = on_two(mode, epochs=3, batch_size=batch_size)
    assert sum(push_counts) >= 3 * -(-SAMPLES // batch_size)
    if not isinstance(mode, SoftSync):  # where the last gradients wait for others
        assert (sample_counts > 0).all()


def test_each_epoch_has_another_order():
    seen = []

    class Noting(keras.Model):
        def train_step(self, data):
            tf.py_function(lambda x: seen.append(np.argmax(x, 1).tolist()), [data[0]], [])
            return super().train_step(data)

    with served(data="shared") as (strategy,):
        model = counting_model(strategy, model=Noting)
        fit(model, epochs=2)
    first, second = seen[:BATCHES], seen[BATCHES:]
    for epoch in (first, second):
        assert sorted(np.concatenate(epoch)) == list(range(SAMPLES))
        assert np.concatenate(epoch).tolist() != list(range(SAMPLES))
    assert first != second


def test_shuffle_within_batches_and_not_at_all():
    for shuffle in (False, "batch"):
        seen = []

        class Noting(keras.Model):
            def train_step(self, data, seen=seen):
                tf.py_function(lambda x: seen.append(np.argmax(x, 1).tolist()), [data[0]], [])
                return super().train_step(data)

        with served(data="shared") as (strategy,):
            fit(counting_model(strategy, model=Noting), shuffle=shuffle)
        expected = [list(range(start, min(start + BATCH, SAMPLES))) for start in range(0, SAMPLES, BATCH)]
        assert [sorted(batch) for batch in seen] == expected
        assert (seen == expected) == (shuffle is False)


class Stopping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("mode", [Asynchronous(), BoundedStaleness(0), Synchronous()], ids=str)
def test_a_worker_that_stops_leaves_its_batches_to_others(mode):
    sample_counts, push_counts = on_two(mode, kinds=({}, {"callbacks": [Stopping()]}))
    assert sum(push_counts) == BATCHES
    assert push_counts[1] <= 1
    if not isinstance(mode, Synchronous):
        np.testing.assert_array_equal(sample_counts, 1)


def test_a_worker_whose_step_raises_leaves_its_batches_to_others():
    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch:
                raise KeyError("the user's")

    with served(workers=2, data="shared") as strategies:
        model, other = (counting_model(strategy) for strategy in strategies)
        fit(model, epochs=0)
        with pytest.raises(KeyError):
            fit(model, callbacks=[Failing()])
        fit(other)  # the epoch ended when all had left it
        assert not model.distribute_strategy.extended.is_sharing
        np.testing.assert_array_equal(np.unique(counts(model)), [0, 1])


def test_a_step_without_an_update_uses_its_batch_up():
    class Sparing(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            (gradient,) = tape.gradient(loss, self.trainable_variables)

            def update():
                self.optimizer.apply([gradient])
                return 1

            tf.cond(tf.reduce_any(x[:, 0] == 0), update, lambda: 0)
            return {"loss": loss}

    with served(data="shared") as (strategy,):
        model = counting_model(strategy, model=Sparing)
        fit(model, epochs=2, batch_size=1, shuffle=False)
        np.testing.assert_array_equal(counts(model), [0, *[2] * (SAMPLES - 1)])


@pytest.mark.parametrize("is_scaled", [False, True])
def test_accumulated_gradients_of_dealt_batches_are_means(is_scaled):
    """Keras counts updates in a tensor then, not in a variable."""

    def optimizer():
        accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(accumulating, initial_scale=4) if is_scaled else accumulating

    with served(data="shared") as (strategy,):
        model = counting_model(strategy, optimizer)
        fit(model, epochs=2, batch_size=1, shuffle=False)
        np.testing.assert_allclose(counts(model), [1] * SAMPLES)


def test_dataset_batches_are_shared_between_workers():
    with served(workers=2, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(BATCH)
        together(*(lambda m=m: m.fit(data, epochs=2, verbose=0) for m in models))
        np.testing.assert_array_equal(counts(models[0]), 2)


def test_validation_split_and_weights():
    with served(data="shared") as (strategy,):
        model = counting_model(strategy)
        history = fit(model, validation_split=0.5, sample_weight=np.ones(SAMPLES))
        np.testing.assert_array_equal(counts(model), [1] * (SAMPLES // 2) + [0] * (SAMPLES // 2))
        assert "val_loss" in history.history


def slices():
    return tf.data.Dataset.from_tensor_slices((X, X[:, :1]))


def test_own_data_are_not_shared():
    with served(workers=2, data="own") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        for model in models:
            fit(model)
            assert keras_shared_data.shared_by(model) is None
        assert pushes(*models) == [BATCHES, BATCHES]


def test_data_by_index_and_streams_in_turn():
    with served(data="shared") as (strategy,):
        model = counting_model(strategy)
        shuffled = slices().shuffle(9).batch(BATCH)
        for _ in range(2):
            fit(model)
            model.fit(shuffled, verbose=0)
        np.testing.assert_array_equal(counts(model), 4)


def test_progress_is_that_of_the_epoch(capsys):
    with served(data="shared") as (strategy,):
        fit(counting_model(strategy), verbose=1, epochs=2)
    assert capsys.readouterr().out.count(f"{BATCHES}/{BATCHES}") >= 2


@pytest.mark.parametrize("servers", [sweep(1), 2])
def test_the_last_round_of_an_epoch_does_not_wait_for_the_next_epoch(servers):
    """Each epoch has one batch, for one of two workers: each is an update, made before the epoch ends."""
    x = np.random.default_rng(0).normal(size=(8, SAMPLES)).astype("float32")
    given = {"x": x, "y": x[:, :1], "batch_size": 8, "epochs": 5, "shuffle": False, "validation_data": (x, x[:, :1])}

    def linear(strategy):
        return counting_model(strategy, lambda: keras.optimizers.SGD(0.01))

    with served(workers=2, servers=servers, mode=Synchronous(), data="shared") as strategies:
        models, histories = [linear(strategy) for strategy in strategies], {}
        together(*(lambda m=m, n=n: histories.update({n: fit(m, **given)}) for n, m in enumerate(models)))
        for model in models:
            counts(model)
            assert int(model.optimizer.iterations) == 5
            assert len(histories[0].history["val_loss"]) == 5
        np.testing.assert_array_equal(models[0].get_weights()[0], models[1].get_weights()[0])


class Largest(keras.metrics.Metric):
    """The largest label so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self):
        return self.value.value


def test_logs_of_an_epoch_are_of_all_workers():
    """Also of one that comes late, as here the second one, and gets none of the batches."""
    y = np.arange(SAMPLES, dtype="float32")[:, None]

    def make(strategy):
        metrics = [keras.metrics.MeanAbsoluteError("error"), Largest()]
        return counting_model(strategy, lambda: keras.optimizers.SGD(0.0), metrics=metrics)

    arguments = {"epochs": 2, "validation_data": (X, y)}
    alone = fit(make(tf.distribute.get_strategy()), y=y, **arguments).history
    assert alone["largest"] == [SAMPLES - 1] * 2
    with served(workers=2, data="shared") as strategies:
        models, histories = [make(strategy) for strategy in strategies], {}
        together(
            *(lambda m=m, n=n: histories.update({n: fit(m, y=y, **arguments).history}) for n, m in enumerate(models))
        )
        for history in histories.values():
            for name, values in alone.items():
                np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)
        assert histories[0] == histories[1]
        assert sum(map(sum, [pushes(model) for model in models])) == 2 * BATCHES


def test_a_worker_that_gets_no_batch_has_the_newest_weights_and_the_logs_of_the_others():
    with served(workers=2, data="shared") as (first, second):
        chief, late = counting_model(first, metrics=["mae"]), counting_model(second, metrics=["mae"])
        models, histories = {"chief": chief, "late": late}, {}

        def train(name):
            histories[name] = fit(models[name], batch_size=SAMPLES, epochs=2).history

        together(*(lambda name=name: train(name) for name in models))
        assert histories["chief"] == histories["late"]
        assert set(histories["late"]) == {"loss", "mae"}
        np.testing.assert_array_equal(chief.get_weights()[0], late.get_weights()[0])


class TwoOptimizers(keras.Model):
    """Updates its weights by an optimizer that only its steps know."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        if not hasattr(self, "other"):
            self.other = keras.optimizers.SGD(1.0)
        self.other.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("model", [keras.Model, TwoOptimizers])
@pytest.mark.parametrize("batches", [1, 2])
def test_eager_steps_of_a_worker_wait_for_a_chief_that_comes_late(model, batches):
    """The chief asks for a batch after the other worker has all that it can get, and needs the chief's values."""
    asked = threading.Event()

    class Asking(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            asked.set()

    class WaitingForWorker(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            assert asked.wait(DEADLINE)

    with served(workers=2, mode=BoundedStaleness(0), data="shared") as (first, second):
        chief, worker = (counting_model(strategy, model=model, run_eagerly=True) for strategy in (first, second))
        together(
            lambda: fit(chief, batch_size=SAMPLES // batches, callbacks=[WaitingForWorker()]),
            lambda: fit(worker, batch_size=SAMPLES // batches, callbacks=[Asking()]),
        )
        np.testing.assert_array_equal(counts(chief), 1)
        assert sum(pushes(chief, worker)) == batches


class OwnLogs(keras.Model):
    """Returns what is no metric's result."""

    def train_step(self, data):
        super().train_step(data)
        return {"own": keras.ops.convert_to_tensor(1.0)}


@pytest.mark.parametrize(("taken", "others", "has_all"), [(0, 0, False), (0, 1, True), (1, 0, True)])
def test_logs_of_an_epoch_that_nobody_knows_any_more_are_not_all_logs(taken, others, has_all):
    """A worker that comes late asks for an epoch whose metrics the servers have forgotten."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.ones((3, 2)), np.ones((3, 1)))
    if not taken:
        model.reset_metrics()
    epochs = types.SimpleNamespace(
        taken=taken, merged=lambda arrays, rules, names: [array + others for array in arrays]
    )
    shared = types.SimpleNamespace(epochs=epochs, has_all_logs=None)
    assert keras_shared_data._merge_logs(model, None, shared).keys() == {"loss"}
    assert shared.has_all_logs is has_all


def test_custom_logs_are_nan_without_batches():
    """0 would be the best of all."""
    with served(workers=2, data="shared") as strategies:
        models, histories = [counting_model(strategy, model=OwnLogs) for strategy in strategies], {}
        together(
            *(
                lambda m=m, n=n: histories.update({n: fit(m, batch_size=SAMPLES, epochs=2).history})
                for n, m in enumerate(models)
            )
        )
        logs = [value for history in histories.values() for value in history.get("own", [])]
        assert [value for value in logs if not np.isnan(value)] == [1, 1], "one of them gets the batch of each epoch"


def test_a_worker_that_gets_no_batch_ends_its_epochs_all_the_same(recwarn, capsys):
    with served(workers=2, data="shared") as (first, second):
        chief, late = counting_model(first, metrics=["mae"]), counting_model(second, metrics=["mae"])
        fit(chief, epochs=3)
        history = fit(late, epochs=3, verbose=1, callbacks=[keras.callbacks.EarlyStopping("loss", patience=9)])
        assert history.epoch == [0, 1, 2]
        assert pushes(late) in ([0], [])
        np.testing.assert_array_equal(counts(chief), 3)
    assert not [warning for warning in recwarn if "ran out of data" in str(warning.message)]


def test_workers_must_have_the_same_data():
    with served(workers=2, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        begun = threading.Event()

        class Begun(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                begun.set()
                assert ended.wait(DEADLINE)

        ended = threading.Event()

        def other():
            assert begun.wait(DEADLINE)
            try:
                with pytest.raises(Exception, match="all workers must train on the same data"):
                    fit(models[1], X[:8], X[:8, :1])
            finally:
                ended.set()

        together(lambda: fit(models[0], callbacks=[Begun()]), other)


def test_several_updates_in_a_step_raise_if_synchronous():
    """The batch is committed by the first one; where workers wait for each other, it is an error."""

    class Twice(keras.Model):
        def train_step(self, data):
            for _ in range(2):
                logs = super().train_step(data)
            return logs

    with served(data="shared") as (strategy,):
        model = counting_model(strategy, model=Twice)
        fit(model)
        np.testing.assert_array_equal(counts(model), 2)
    with served(data="shared", mode=Synchronous()) as (strategy,), pytest.raises(ValueError, match="with one update"):
        fit(counting_model(strategy, model=Twice))


def test_a_worker_that_had_to_wait_for_its_batch_trains_on_the_newest_values():
    seen, threads = [], []

    class Noting(keras.Model):
        def train_step(self, data):
            tf.py_function(lambda kernel: seen.append(kernel.numpy().min()), [self.trainable_variables[0].value], [])
            return super().train_step(data)

    with served(workers=2, data="shared") as (first, second):
        chief, waiting = counting_model(first), counting_model(second, model=Noting)
        deals = first.servers[0]._shards.deals

        class Leaving(keras.callbacks.Callback):
            """Holds one of two batches when the other worker begins, makes an update, and leaves."""

            def on_train_batch_end(self, batch, logs=None):
                threads.append(threading.Thread(target=fit, args=(waiting,), kwargs={"batch_size": 11}, daemon=True))
                threads[0].start()
                end = time.monotonic() + DEADLINE
                while deals.idle != {1}:
                    assert time.monotonic() < end
                    time.sleep(0.01)
                chief.optimizer.apply([tf.fill([SAMPLES, 1], -5.0)], chief.trainable_variables)
                chief.stop_training = True

        fit(chief, batch_size=11, callbacks=[Leaving()])
        threads[0].join(DEADLINE)
        assert not threads[0].is_alive()
        assert seen == [5], "with what was pushed while it waited"
        np.testing.assert_array_equal(counts(chief), 6)
