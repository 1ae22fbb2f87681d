"""Files and backups of models on parameter servers, which are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils import file_utils

from tests.strategies.ranked import model_of
from tests.strategies.served import served
from tests.strategies.servers.trained import X, Y, assert_close, fit, model_in
from tests.sweeps import sweep
from tfdist.strategies.keras import keras_callbacks


def test_a_saved_model_has_the_servers_state(tmp_path):
    alone = model_in(optimizer="adam")
    fit(alone)
    with served(servers=2) as (strategy,):
        model = model_in(strategy, "adam")
        fit(model)
        model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    again.run_eagerly = True
    assert_close(again, alone)
    for variable, other in zip(again.optimizer.variables, alone.optimizer.variables, strict=True):
        np.testing.assert_allclose(variable, other, rtol=1e-3, atol=1e-6, err_msg=variable.path)
    fit(again, epochs=1)
    fit(alone, epochs=1)
    assert_close(again, alone)


def test_a_checkpoint_has_the_servers_state(tmp_path):
    """TensorFlow saves an optimizer as a part of any object."""
    with served() as (strategy,):
        model = model_in(strategy)
        fit(model)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
        expected = [np.array(variable) for variable in model.optimizer.variables]
        model.save(tmp_path / "model.keras")
        saved = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert any(np.any(variable) for variable in expected[2:])
    for variable, other in zip(expected, saved.variables, strict=True):
        np.testing.assert_array_equal(variable, np.array(other))


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
            model = model_in(strategy, run_eagerly=True)
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


@pytest.mark.parametrize("data", [sweep("own"), "shared"])
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
            models = [model_in(strategy, run_eagerly=True) for strategy in strategies]
            return [threads.submit(work, model) for model in models]

    for future in train(stops=True):
        with pytest.raises(KeyError, match="interrupted"):
            future.result()
    assert (tmp_path / "backup" / "epoch_of_worker_1.json").exists()
    assert [future.result().epoch for future in train(stops=False)] == [[2, 3], [2, 3]]
    assert not (tmp_path / "backup" / "epoch_of_worker_1.json").exists()
