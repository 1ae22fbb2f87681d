"""Keras's methods on parameter servers, which are threads of this process."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils import file_utils

from tests.strategies.ranked import model_of
from tests.strategies.served import served
from tests.sweeps import some, sweep
from tfdist import compression
from tfdist.parameter_server import BoundedStaleness, LocalSteps
from tfdist.parameter_server.worker.client import MessageRefusedError
from tfdist.strategies.keras import keras_callbacks

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = X[:, :2] ** 2


def with_momentum():
    """An optimizer that has slots, and less to trace than Adam."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def model_in(strategy=None, optimizer=with_momentum, **options):
    """A model under a strategy; or a reference, which is eager, as it would trace longer than it trains."""
    keras.utils.set_random_seed(0)
    options = {"run_eagerly": strategy is None, **options}

    def make():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def fit(model, data=None, **options):
    options = {"epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(data, **options) if data is not None else model.fit(X, Y, batch_size=16, **options)


def assert_close(model, reference, rtol=1e-4):
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=rtol, atol=1e-5)


def links(model):
    return model.distribute_strategy.extended.links(model)


OPTIONS = {
    "adam": {"optimizer": "adam", "metrics": ["mae"]},
    "averages": {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8)},
    "schedule": {"optimizer": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.3, 9))},
    "loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))},
    "steps": {"optimizer": "adam", "steps_per_execution": 3},
    "eager": {"optimizer": "adam", "run_eagerly": True},
}


@pytest.mark.parametrize("name", some(OPTIONS, 6, first=3))
def test_one_worker_trains_as_keras_does(name):
    alone = model_in(**OPTIONS[name])
    expected = fit(alone, validation_data=(X, Y))
    with served(servers=2) as (strategy,):
        model = model_in(strategy, **OPTIONS[name])
        history = fit(model, validation_data=(X, Y))
        assert_close(model, alone)
        for key, values in expected.history.items():
            np.testing.assert_allclose(history.history[key], values, rtol=1e-4, err_msg=key)
        assert int(model.optimizer.iterations) == 12


@pytest.mark.parametrize(
    ("method", "pushes"),
    some(
        [
            (compression.BFloat16(), None),
            (compression.BFloat16(), LocalSteps(2)),
            (compression.Schedule({0: None, 3: compression.TopK(0.5)}), None),
            (compression.Schedule({0: None, 3: compression.TopK(0.5)}), LocalSteps(2)),
        ],
        every=4,
        first=3,
    ),
)
def test_compressed_gradients_train_nearly_as_well(method, pushes):
    alone = model_in(optimizer=lambda: keras.optimizers.SGD(0.1))
    expected = fit(alone, epochs=5)
    with served(servers=2, compression=compression.skip_small(method, elements=0), pushes=pushes) as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1))
        history = fit(model, epochs=5)
        np.testing.assert_allclose(history.history["loss"][-1], expected.history["loss"][-1], rtol=0.1)
        (link,) = links(model)
        state = link._packers[0]._states[0]
        assert state.step == link.session.pushes - (0 if isinstance(method, compression.BFloat16) else 3)
        assert state.array("residual", state.arrays["residual"]).any()


@pytest.mark.parametrize(
    "options", [sweep({}, id="pulls"), pytest.param({"compression": compression.BFloat16()}, id="pushes and pulls")]
)
@pytest.mark.parametrize("method", [sweep(compression.BFloat16()), compression.TopK(0.3)], ids=str)
def test_compressed_parameters_train_nearly_as_well(method, options):
    expected = fit(model_in(optimizer=lambda: keras.optimizers.SGD(0.1)), epochs=5)
    with served(servers=2, pull_compression=compression.skip_small(method, elements=0), **options) as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1))
        history = fit(model, epochs=5, validation_data=(X, Y))
        np.testing.assert_allclose(history.history["loss"][-1], expected.history["loss"][-1], rtol=0.1)
        loss = model.evaluate(X, Y, verbose=0)
        np.testing.assert_allclose(loss, history.history["val_loss"][-1], rtol=1e-6, err_msg="the servers' own")
        (link,) = links(model)
        assert all(replica._decoder._has for replica in link.session._replicas)


@pytest.mark.parametrize("steps", [sweep(1), 3])
def test_data_of_unknown_length_make_no_update_more(steps):
    with served() as (strategy,):
        model = model_in(strategy, steps_per_execution=steps)
        fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True))
        (link,) = links(model)
        assert (link.session.pushes, int(model.optimizer.iterations)) == (12, 12)


@pytest.mark.parametrize("method", ["evaluate", sweep("predict")])
def test_evaluate_and_predict_read_newest_values(method):
    with served(workers=2) as (first, second):
        chief, worker = model_in(first), model_in(second)
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        before = chief.get_weights()
        getattr(chief, method)(X, *([Y] if method == "evaluate" else []), verbose=0)
        assert_close(chief, worker, rtol=0)
        assert not np.array_equal(before[0], chief.get_weights()[0])


def test_an_epoch_begins_with_the_newest_values():
    with served(workers=2) as (first, second):
        chief, worker = model_in(first), model_in(second)
        fit(chief, epochs=1)  # the chief makes the model on the servers
        between = Between(worker)
        fit(chief, epochs=2, callbacks=[between])
        for weight, expected in zip(between.begun_with, between.left, strict=True):
            np.testing.assert_array_equal(weight, expected)
        (link,) = links(chief)
        assert link.session.iterations == 16, "the chief's three epochs of four steps, and the worker's"


class Between(keras.callbacks.Callback):
    """Another worker trains between two epochs; nobody waits for this one meanwhile."""

    def __init__(self, other):
        super().__init__()
        self.other, self.left, self.begun_with = other, None, None

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            (link,) = links(self.model)
            assert link.session.is_suspended
            fit(self.other, epochs=1)
            self.left = self.other.get_weights()

    def on_train_batch_begin(self, batch, logs=None):
        if self.left is not None and self.begun_with is None:
            self.begun_with = self.model.get_weights()


def test_a_saved_model_has_the_servers_state(tmp_path):
    alone = model_in(optimizer="adam")
    fit(alone)
    with served(servers=2) as (strategy,):
        model = model_in(strategy, "adam")
        fit(model)
        model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_close(again, alone)
    for variable, other in zip(again.optimizer.variables, alone.optimizer.variables, strict=True):
        np.testing.assert_allclose(variable, other, rtol=1e-3, atol=1e-6, err_msg=variable.path)
    fit(again, epochs=1)
    fit(alone, epochs=1)
    assert_close(again, alone)


@pytest.mark.parametrize("saves", [sweep("ModelCheckpoint"), "save", sweep("evaluate")])
def test_saving_keeps_learning_rate_set_by_callback(saves, tmp_path):
    """At the same epoch's end; the servers learn it with the next step."""
    rates = []

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if saves == "save":
                self.model.save(tmp_path / "model.keras")
            if saves == "evaluate":
                self.model.evaluate(X, Y, verbose=0)
            rates.append(float(self.model.optimizer.learning_rate))

    def callbacks():
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1e9)
        checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
        return [plateau, *([checkpoint] if saves == "ModelCheckpoint" else []), Saves()]

    alone = model_in(optimizer=lambda: keras.optimizers.SGD(0.1))
    fit(alone, epochs=4, callbacks=callbacks())
    expected, rates = rates, []
    with served() as (strategy,):
        model = model_in(strategy, optimizer=lambda: keras.optimizers.SGD(0.1))
        fit(model, epochs=4, callbacks=callbacks())
        assert_close(model, alone)
    assert rates == expected == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_training_goes_on_from_a_saved_model(tmp_path):
    alone = model_in(optimizer="adam")
    fit(alone)
    alone.save(tmp_path / "model.keras")
    fit(alone, epochs=1)
    with served() as (strategy,):
        with strategy.scope():
            model = keras.models.load_model(tmp_path / "model.keras")
        fit(model, epochs=1)
        assert_close(model, alone)
        assert int(model.optimizer.iterations) == 16


def test_only_the_chief_writes(tmp_path, caplog):
    """A worker says so once for each method, but not where Keras calls it."""
    with served(workers=2) as strategies:
        for place, strategy in enumerate(strategies):
            model = model_in(strategy)
            fit(model, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / f"{place}.keras")])
            assert caplog.text == ""
            for _ in range(2):
                model.save(tmp_path / f"{place}.again.keras")
                model.save_weights(tmp_path / f"{place}.weights.h5")
                model.export(tmp_path / f"{place}.exported", verbose=False)
    assert {path.name for path in tmp_path.iterdir()} == {*("0.keras", "0.again.keras", "0.weights.h5", "0.exported")}
    said = [record.getMessage() for record in caplog.records if record.name == "tfdist"]
    assert [text.partition(" writes nothing on this worker: the chief writes")[0] for text in said] == [
        "tfdist: `model.save`",
        "tfdist: `model.save_weights`",
        "tfdist: `model.export`",
    ]


class Pair(keras.Model):
    """Two models in one step, as of a GAN, which builds them; no `call`."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")]) for _ in range(2)]

    def compile(self):
        super().compile()
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]

    def train_step(self, data):
        x, y = data
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((part(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("data", ["own", sweep("shared")])
def test_custom_train_step_works_without_call(data):
    alone = Pair()
    alone.compile()
    with served(data=data) as (strategy,):
        with strategy.scope():
            model = Pair()
            model.compile()
        for each_model in (model, alone):
            fit(each_model)
        assert_close(model, alone)


def test_no_batch_of_a_generator_is_left_out():
    def batches():
        yield from ((X[start : start + 10], Y[start : start + 10]) for start in range(0, 50, 10))

    with served() as (strategy,):
        models = model_in(), model_in(strategy)
        for model in models:
            fit(model, batches(), steps_per_epoch=5, epochs=1)
        assert_close(*models)
        assert models[1].optimizer.iterations == 5


def test_custom_loop_trains_as_keras_does():
    alone, optimizer = model_in(), keras.optimizers.SGD(0.1)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            served_optimizer = keras.optimizers.SGD(0.1)

        def step(model, optimizer, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        @tf.function
        def on_servers(x, y):
            strategy.run(step, args=(model, served_optimizer, x, y))

        for _ in range(3):
            on_servers(tf.constant(X), tf.constant(Y))
            step(alone, optimizer, X, Y)
        assert_close(model, alone)


@pytest.mark.parametrize("read", [lambda model, path: model.evaluate(X, Y, verbose=0), keras.Model.save])
def test_weights_that_the_chief_sets_are_the_newest(read, tmp_path):
    with served() as (strategy,):
        model = model_in(strategy)
        fit(model, epochs=1)
        kept = [weight + 1 for weight in model.get_weights()]
        model.set_weights(kept)
        read(model, tmp_path / "model.keras")
        for array, other in zip(model.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(array, other)


def test_the_best_weights_are_restored():
    stopping = {"monitor": "val_loss", "mode": "max", "patience": 0, "restore_best_weights": True}
    alone = model_in()
    fit(alone, epochs=3, validation_data=(X, Y), callbacks=[keras.callbacks.EarlyStopping(**stopping)])
    with served() as (strategy,):
        model = model_in(strategy)
        fit(model, epochs=3, validation_data=(X, Y), callbacks=[keras.callbacks.EarlyStopping(**stopping)])
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-4)
        fit(model, epochs=1)
        fit(alone, epochs=1)
        assert_close(model, alone)


def test_moving_averages_stay_after_fit():
    alone = model_in(**OPTIONS["averages"])
    fit(alone)
    with served() as (strategy,):
        model = model_in(strategy, **OPTIONS["averages"])
        fit(model)
        model.evaluate(X, Y, verbose=0)
        assert_close(model, alone)
        fit(model, epochs=1)
        fit(alone, epochs=1)
        assert_close(model, alone)


def test_moving_averages_are_what_other_workers_read_after_fit():
    """Also before the chief has given them to the servers, and what it assigns then is newer."""
    with served(workers=2) as (first, second):
        chief, worker = model_in(first, **OPTIONS["averages"]), model_in(second, **OPTIONS["averages"])
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        averages = worker.get_weights()
        worker.evaluate(X, Y, verbose=0)
        for weight, expected in zip(worker.get_weights(), averages, strict=True):
            np.testing.assert_array_equal(weight, expected)
        chief.set_weights(assigned := [np.ones_like(weight) for weight in averages])
        chief.evaluate(X, Y, verbose=0)
        worker.evaluate(X, Y, verbose=0)
        for weight, expected in zip(worker.get_weights(), assigned, strict=True):
            np.testing.assert_array_equal(weight, expected)


def test_evaluate_of_frozen_model_reads_newest_values():
    with served(workers=2) as (first, second):
        chief, worker = model_in(first), model_in(second)
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        chief.trainable = False
        chief.evaluate(X, Y, verbose=0)
        assert_close(chief, worker, rtol=0)


def test_layers_are_frozen_and_thawed():
    """With `compile` in between, as transfer learning does."""

    def train(model):
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit(model, epochs=1)
        model.layers[0].trainable = True
        model.compile(keras.optimizers.Adam(0.01), "mse")
        fit(model, epochs=1)

    alone = model_in()
    train(alone)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            train(model)
        assert_close(model, alone)


def test_optimizers_take_turns():
    """Each goes on with the newest values, and with its own slots."""

    def train(model):
        adam, momentum = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9)
        for optimizer in (adam, momentum, adam, keras.optimizers.Adam(0.01)):
            model.compile(optimizer, "mse", run_eagerly=model.run_eagerly)
            fit(model, epochs=1)

    alone = model_in()
    train(alone)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            train(model)
        assert_close(model, alone)
        assert len(links(model)) == 1
        for server in strategy.servers:
            assert len(list(server._shards)) == 1, "the others are over"


class TwoOptimizers(keras.Model):
    """Each half of the variables has its optimizer."""

    def __init__(self):
        super().__init__()
        self.halves = [keras.layers.Dense(2), keras.layers.Dense(2)]
        self.others = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]

    def call(self, inputs):
        return self.halves[0](inputs) + self.halves[1](inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = [half.trainable_variables for half in self.halves]
        for optimizer, half_variables, given in zip(
            self.others, variables, tape.gradient(loss, variables), strict=True
        ):
            optimizer.apply(given, half_variables)
        return {"loss": loss}


@pytest.mark.parametrize(("steps", "fits"), [(1, False), (2, True)])
def test_steps_with_several_optimizers_need_some_slack(steps, fits):
    with served(mode=BoundedStaleness(steps)) as (strategy,):
        with strategy.scope():
            model = TwoOptimizers()
            model.compile()
        with (
            contextlib.nullcontext() if fits else pytest.raises(ValueError, match=r"of a GAN, need BoundedStaleness\(2")
        ):
            fit(model, epochs=1)


def test_two_models_with_a_shared_layer_may_not_be_trained_in_turn():
    with served() as (strategy,), strategy.scope():
        shared, models = keras.layers.Dense(4), []
        for _ in range(2):
            models.append(keras.Sequential([keras.layers.Input((4,)), shared, keras.layers.Dense(2)]))
            models[-1].compile("sgd", "mse")
            fit(models[-1], epochs=1)
        with pytest.raises(tf.errors.OpError, match="do not update variables by two optimizers in turn"):
            fit(models[0], epochs=1)


def test_restarted_worker_trains_finished_model_alone(caplog):
    """The worker was started again, and its script begins with the first call of `fit`."""
    with served(workers=2) as (first, second):
        chief, worker = model_in(first, "adam"), model_in(second, "adam")
        fit(chief, epochs=1)
        with first.scope():
            chief.compile("sgd", "mse")
        fit(chief, epochs=1)
        fit(worker, epochs=2)
        alone = model_in(optimizer="adam")
        fit(alone, epochs=2)
        assert_close(worker, alone)
        assert "all other workers have finished training the model Adam-" in caplog.text
        with second.scope():
            worker.compile("sgd", "mse")
        fit(worker, epochs=1)
        chief.evaluate(X, Y, verbose=0)
        assert_close(worker, chief, rtol=0)


def test_second_model_unlike_the_chiefs_is_refused():
    """The worker would wait for the chief's values for ever."""
    with served(workers=2) as (first, second):
        chief, worker = model_in(first), model_in(second)
        for model in (chief, worker):
            fit(model, epochs=1)
        fit(model_in(first, "adam"), epochs=1)
        with pytest.raises(MessageRefusedError, match="but the chief trains Adam-"):
            fit(model_in(second), epochs=1)


def test_models_are_trained_in_several_threads():
    with served() as (strategy,):
        models = [model_in(strategy) for _ in range(2)]
        threads = [threading.Thread(target=fit, args=(model,), daemon=True) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        alone = model_in()
        fit(alone)
        for model in models:
            assert_close(model, alone)


def test_gradients_are_applied_outside_the_scope():
    alone, optimizer = model_in(), keras.optimizers.SGD(0.1)
    with served() as (strategy,):
        model = model_in(strategy)
        with strategy.scope():
            served_optimizer = keras.optimizers.SGD(0.1)
        for using, trained in ((served_optimizer, model), (optimizer, alone)):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((trained(X, training=True) - Y) ** 2)
                gradients = tape.gradient(loss, trained.trainable_variables)
                using.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))
        assert_close(model, alone)
        assert strategy.extended.link_of(served_optimizer).session.pushes == 2


def test_only_the_chief_backs_up(tmp_path):
    """All workers name one folder, and the first to end would remove the backup."""
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with served(workers=2) as strategies:
        kept = [backup in keras_callbacks.adapt([backup], model_of(strategy)) for strategy in strategies]
    assert kept == [True, False]


def test_worker_backup_tolerates_chief_creating_and_removing_folder(tmp_path, monkeypatch):
    folder, exists = tmp_path / "backup", file_utils.exists
    callback = keras.callbacks.BackupAndRestore(folder)
    with served(workers=2) as strategies:
        (chief,), (worker,) = ([keras_callbacks.adapt([callback], model_of(strategy))[-1]] for strategy in strategies)
        assert chief is callback
        chief.set_model(model_in(strategies[0]))

        def then_made(path):
            existed = exists(path)
            worker.on_epoch_end(0)
            return existed

        monkeypatch.setattr(file_utils, "exists", then_made)
        chief.on_epoch_end(0)
        monkeypatch.undo()
        worker.on_epoch_end(0)
        assert len(list(folder.iterdir())) == 3, "weights, their epoch, and that of the worker"

        monkeypatch.setattr(tf.io.gfile, "makedirs", lambda path: chief.on_train_end())
        worker.on_epoch_end(1)
        worker.on_train_end()
        assert not folder.exists()


@pytest.mark.parametrize("data", ["own", "shared"])
def test_all_workers_go_on_where_they_were(tmp_path, data):
    """The chief with the weights of its backup, and another worker with the epoch after its last one."""

    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyError("interrupted")

    def train(stops):
        both_have_read = threading.Barrier(2)  # the chief removes the folder at its end
        waits = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: both_have_read.wait(60))

        def work(model):
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
            return fit(model, epochs=4, callbacks=[backup, waits, *([Stops()] if stops else [])])

        with served(workers=2, data=data) as strategies, ThreadPoolExecutor() as threads:
            models = [model_in(strategy) for strategy in strategies]
            return [threads.submit(work, model) for model in models]

    for future in train(stops=True):
        with pytest.raises(KeyError, match="interrupted"):
            future.result()
    assert (tmp_path / "backup" / "epoch_of_worker_1.json").exists()
    assert [future.result().epoch for future in train(stops=False)] == [[2, 3], [2, 3]]
    assert not (tmp_path / "backup" / "epoch_of_worker_1.json").exists()


def test_eager_steps_of_a_frozen_model_attach_nothing():
    with served() as (strategy,):
        model = model_in(strategy, run_eagerly=True)
        model.trainable = False
        model.compile("sgd", "mse", run_eagerly=True)
        fit(model)
        assert strategy.extended.link_of(model.optimizer) is None


def test_steps_are_traced_once():
    """A `tf.function` that makes variables is traced again: what a link makes of the optimizer is made outside."""
    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data):
            traces.append(data)
            return super().train_step(data)

    with served() as (strategy,), strategy.scope():
        model = Traced([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile(with_momentum(), "mse")
        fit(model, epochs=1)
    assert len(traces) == 1
