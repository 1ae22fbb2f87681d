import contextlib
import json
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, on_ranks
from tfdist.compression import TopK
from tfdist.strategies.keras import keras_backup

X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def batches(rows):
    """A dataset of batches: of arrays, Keras would trace functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows)


def callback_for(strategy, folder, value=1.0, **arguments):
    """`BackupAndRestore`, shared, of a model whose weights are of one value."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        model.optimizer.build(model.trainable_variables)  # as `fit` has it before callbacks begin
    assign(model, value)
    callback = keras.callbacks.BackupAndRestore(folder, **arguments)
    callback.set_model(model)
    keras_backup.share(callback, strategy.extended)
    return callback, model


def assign(model, value):
    model.set_weights([np.full(weight.shape, value) for weight in model.get_weights()])


def values(model):
    return {float(value) for weight in model.get_weights() for value in np.ravel(weight)}


def backed_up(strategy, folder, epochs):
    """Writes a backup after each of some epochs, with the epoch as the weights' value."""
    callback, model = callback_for(strategy, folder)
    for epoch in range(1, epochs + 1):
        assign(model, epoch)
        callback._current_epoch = epoch
        callback._save_model()
    return callback


@pytest.mark.parametrize("compression", [None, TopK(0.5)], ids=["", "residuals"])
def test_processes_that_write_nothing_make_no_folder(ranks, tmp_path, compression):
    """Each has a folder of its own, as on machines that share no files."""
    on_ranks(ranks(2), lambda strategy: backed_up(strategy, tmp_path / str(strategy.rank), 1), compression=compression)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists() == (compression is not None)


def restored(strategy, folder):
    callback, model = callback_for(strategy, folder, value=100.0)
    callback._load_model()
    return values(model), model._initial_epoch or 0


def test_a_backup_holds_its_epoch_in_the_file_of_its_weights(strategy, tmp_path):
    callback = backed_up(strategy, tmp_path, 3)
    with h5py.File(callback._weights_path) as file:
        assert json.loads(file.attrs["training_metadata"])["epoch"] == 3
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 3  # for Keras itself
    assert not list(tmp_path.glob(".*"))
    assert restored(strategy, tmp_path) == ({3.0}, 3)


def test_without_a_backup_training_begins_at_the_start(strategy, tmp_path):
    assert restored(strategy, tmp_path) == ({100.0}, 0)


def test_a_process_killed_between_the_two_files_trains_no_epoch_twice(strategy, tmp_path):
    """Keras's own file of the epoch is that of the backup before."""
    backed_up(strategy, tmp_path, 2)
    metadata = tmp_path / "training_metadata.json"
    metadata.write_text(json.dumps({"epoch": 1, "batch": 0}))
    assert restored(strategy, tmp_path) == ({2.0}, 2)
    metadata.unlink()
    assert restored(strategy, tmp_path) == ({2.0}, 2)


@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test_the_backup_before_counts_where_the_last_is_damaged(strategy, tmp_path, caplog, damage):
    callback = backed_up(strategy, tmp_path, 3)
    latest = keras_backup.Path(callback._weights_path)
    if damage == "missing":
        latest.unlink()
    else:
        latest.write_bytes(latest.read_bytes()[:1000])
    assert restored(strategy, tmp_path) == ({2.0}, 2)
    assert ("cannot be read" in caplog.text) == (damage == "cut off")


def test_unreadable_backups_raise(strategy, tmp_path):
    backed_up(strategy, tmp_path, 2)
    for file in tmp_path.glob("*.weights.h5"):
        file.write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match=f"the backup in {tmp_path} cannot be read: "):
        restored(strategy, tmp_path)


def test_backup_written_by_plain_keras_is_restored(strategy, tmp_path):
    """From a run without tfdist."""
    callback, model = callback_for(strategy, tmp_path, value=7.0)
    with strategy.extended.local_only():
        model.save_weights(callback._weights_path)
    (tmp_path / "training_metadata.json").write_text(json.dumps({"epoch": 4, "batch": 0}))
    assert restored(strategy, tmp_path) == ({7.0}, 4)


def test_all_go_on_from_the_chiefs_backup(ranks, tmp_path):
    """Rank 1 sees another folder, and has other weights."""

    def work(strategy):
        folder = tmp_path / str(strategy.rank)
        backed_up(strategy, folder, 2)
        return sorted(file.name for file in folder.glob("*")), restored(strategy, folder)

    (files, first), (none, second) = on_ranks(ranks(2), work)
    assert "latest.weights.h5" in files
    assert none == []
    assert first == second == ({2.0}, 2)


def test_unreadable_backup_of_chief_raises_on_all_ranks(ranks, tmp_path):
    told = []

    def work(strategy):
        backed_up(strategy, tmp_path, 1)
        strategy.extended.exchange.barrier()
        if strategy.rank == 0:
            (tmp_path / "latest.weights.h5").write_bytes(b"damaged")
        try:
            restored(strategy, tmp_path)
        except RuntimeError as error:
            told.append((strategy.rank, str(error)))

    on_ranks(ranks(2), work)
    (_, chief), (_, other) = sorted(told)
    assert "cannot be read: " in chief
    assert "the chief could not read the backup in" in other


@pytest.mark.parametrize("keeps", [True, False])
def test_fit_resumes_and_deletes_backup_unless_kept(ranks, tmp_path, keeps):
    """What was trained is not trained again; at the end the backup is removed, unless it is to be kept."""

    def work(strategy):
        epochs = []
        for total in (1, 3):
            callback, model = callback_for(strategy, tmp_path, delete_checkpoint=not keeps)
            epochs.append(model.fit(batches(4), epochs=total, shuffle=False, verbose=0, callbacks=[callback]).epoch)
            strategy.extended.exchange.barrier()
        return epochs

    assert on_ranks(ranks(2), work) == [[[0], [1, 2] if keeps else [0, 1, 2]]] * 2
    assert bool(list(tmp_path.rglob("*.weights.h5"))) == keeps


def test_a_callback_is_changed_once(strategy, tmp_path):
    callback, _ = callback_for(strategy, tmp_path)
    load = callback._load_model
    keras_backup.share(callback, strategy.extended)
    assert callback._load_model == load


def test_a_callback_follows_to_another_strategy(ranks, tmp_path):
    first, second = (Ranked(ranks(1).groups[0]) for _ in range(2))
    callback, _ = callback_for(first, tmp_path)
    keras_backup.share(callback, second.extended)
    assert callback._tfdist_shared.extended is second.extended


def test_a_callback_serves_either_with_or_without_parameter_servers(strategy, tmp_path):
    callback, model = callback_for(strategy, tmp_path)
    on_server = keras.callbacks.BackupAndRestore(tmp_path / "other")
    on_server.set_model(model)
    for _ in range(2):
        assert keras_backup.on_servers([on_server], SimpleNamespace(worker=0)) == [on_server]
    with pytest.raises(ValueError, match=r"only without .* has been used under them: make another one for this str"):
        keras_backup.share(on_server, strategy.extended)
    for worker in range(2):
        with pytest.raises(ValueError, match=r"only under .* used without them: make another one for this strategy"):
            keras_backup.on_servers([callback], SimpleNamespace(worker=worker))


class OwnStep(keras.Model):
    """A model that is never called: `fit` builds its optimizer in the first step."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(2, 1), name="kernel")
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernel - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, [self.kernel.value]), [self.kernel])
        return {"loss": loss}


class Interruption(keras.callbacks.Callback):
    """Notes the epochs, and raises after a batch of one of them."""

    def __init__(self, epoch=None, batch=0):
        super().__init__()
        self.place, self.epochs = (epoch, batch), []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if (self.epochs[-1], batch) == self.place:
            raise InterruptedError


def trained_in_own_steps(strategy, interruption, *callbacks):
    """The model's weights and optimizer, different on each rank where nothing makes them equal."""
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5))
    model.kernel.assign([[1.0], [2.0]])
    with contextlib.suppress(InterruptedError):
        model.fit(batches(2), epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks, interruption])
    strategy.extended.exchange.barrier()
    return [variable.numpy().tolist() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("size", [1, 2])
def test_model_with_unbuilt_optimizer_resumes_as_uninterrupted(ranks, tmp_path, size):
    """Every rank ends as if nothing had interrupted it."""

    def work(strategy):
        backup, again = (
            keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False) for _ in range(2)
        )
        trained_in_own_steps(strategy, Interruption(epoch=1), backup)
        resumed = Interruption()
        state = trained_in_own_steps(strategy, resumed, again)
        assert state == trained_in_own_steps(strategy, Interruption())
        return resumed.epochs, state

    first, *others = on_ranks(ranks(size), work)
    assert first[0] == [1, 2]
    assert others == [first] * (size - 1)


def test_a_backup_in_the_first_epoch_is_restored_on_all_ranks(ranks, tmp_path):
    """The epoch is trained again, from the weights and the optimizer of the last batch, as in Keras."""

    def work(strategy):
        backup, again = (keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1) for _ in range(2))
        trained_in_own_steps(strategy, Interruption(epoch=0, batch=1), backup)
        resumed = Interruption()
        state = trained_in_own_steps(strategy, resumed, again)
        return resumed.epochs, state

    first, second = on_ranks(ranks(2), work)
    assert first == second
    epochs, (_, iterations, *_) = first
    assert epochs == [0, 1, 2]
    assert iterations == 2 + 6


def test_a_backup_has_one_file_of_residuals_for_each_rank(ranks, tmp_path):
    strategy = Ranked(ranks(1).groups[0], TopK(0.5))
    backed_up(strategy, tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest.weights.h5",
        "previous.weights.h5",
        "residuals.compression-0-of-1.npz",
        "training_metadata.json",
    ]
