"""Checks of callbacks, saving and loading."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from world import check, made, network, state, trained, vectors

import tfdist


@check(2)
def callbacks(place):
    x, y = vectors()
    model = made(place, network, lambda: keras.optimizers.SGD(0.05, 0.9), "mse", metrics=lambda: ["mae"])
    seen = []
    folder = place.folder
    given = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=10.0, patience=1, factor=0.5),
        keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "often.keras", save_freq=3),
        keras.callbacks.TensorBoard(folder / "board", histogram_freq=1),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append([epoch, logs["loss"], logs["val_mae"]]),
            on_train_batch_end=lambda batch, logs: seen.append([batch, logs["loss"], logs["mae"]]),
        ),
    ]
    results = trained(
        place, model, x, y, epochs=6, callbacks=given, validation_data=tf.data.Dataset.from_tensors((x[:8], y[:8]))
    )
    epochs = len(results["history"]["loss"])
    assert epochs == 3, "the loss falls, so that the first epoch's is the largest"
    names = {path.name for path in folder.iterdir()} - {"model.keras"}
    expected = {f"{epoch + 1}.{kind}" for epoch in range(epochs) for kind in ("keras", "weights.h5")}
    expected |= {"best.keras", "often.keras", "board", "log.csv"}
    assert names == (expected if place.chief else set()), names
    weights = model.get_weights()
    if place.chief:
        for name in ("2.keras", "best.keras", "often.keras"):
            keras.models.load_model(folder / name)
        other = keras.models.load_model(folder / "3.keras")
        other.load_weights(folder / "1.weights.h5")
        for weight, restored in zip(other.get_weights(), weights, strict=True):
            np.testing.assert_allclose(weight, restored)
        assert len((folder / "log.csv").read_text().splitlines()) == 1 + epochs
    return {**results, "seen": seen}


class StopsAfterThree(keras.callbacks.Callback):
    """Ends training after the third batch, on the last process alone."""

    def __init__(self, place):
        super().__init__()
        self.wishes = place.strategy is None or place.strategy.rank == place.strategy.size - 1
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        if self.wishes and len(self.seen) == 3:
            self.model.stop_training = True


def stopped_in_the_middle(place, **options):
    x, y = vectors()
    model, stops = made(place, network, "sgd", "mse"), StopsAfterThree(place)
    results = trained(place, model, x, y, callbacks=[stops], **options)
    return {**results, "seen": stops.seen, "again": trained(place, model, x, y, epochs=1)}


@check(2)
def training_stops_in_the_middle_of_an_epoch(place):
    return stopped_in_the_middle(place, validation_data=vectors())


@check(2)
def weights_are_swapped_for_their_averages(place):
    x, y = vectors()
    model = made(place, network, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8), "mse")
    return trained(place, model, x, y, callbacks=[keras.callbacks.SwapEMAWeights()], validation_data=(x, y))


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("interrupted")


@check(2)
def backup_and_restore(place):
    def make():
        return made(place, network, lambda: keras.optimizers.SGD(0.05, 0.9), "mse")

    options = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
    model = make()
    start = model.get_weights()
    if place.strategy is not None:
        backup = place.folder / "backup"
        try:
            model.fit(*vectors(), callbacks=[keras.callbacks.BackupAndRestore(backup), Interruption()], **options)
            raise AssertionError("not interrupted")
        except RuntimeError:
            pass
        assert backup.exists() == place.chief
        model = make()
        options["callbacks"] = [keras.callbacks.BackupAndRestore(backup)]
    model.fit(*vectors(), **options)
    assert place.strategy is None or model.history.epoch == [2, 3], model.history.epoch
    return {"start": start, "loss": model.history.history["loss"][-2:], "state": state(place, model)}


@check(2)
def loading(place):
    """A file of plain Keras goes on in stages, then weights of a file, then weights of arrays."""
    x, y = vectors()
    path = place.shared / "plain.keras"
    if place.chief:
        keras.utils.set_random_seed(1)
        plain = network()
        plain.compile(keras.optimizers.SGD(0.05, 0.9), "mse")
        plain.run_eagerly = True  # which is not in the file
        plain.fit(x, y, shuffle=False, verbose=0)
        plain.save(path)
        plain.fit(x, y, shuffle=False, verbose=0)
        plain.save_weights(place.shared / "plain.weights.h5")
    if place.strategy is not None:
        tfdist.barrier()
    with place.scope():
        model = keras.models.load_model(path)
    model.run_eagerly = place.strategy is None
    results = [trained(place, model, x, y, epochs=1)]
    model.load_weights(place.shared / "plain.weights.h5")
    results.append(state(place, model))
    model.set_weights([weight + 0.1 for weight in model.get_weights()])
    results.append(trained(place, model, x, y, epochs=1))
    model.save_weights(place.shared / "own.weights.h5")
    other = made(place, network, "sgd", "mse")
    other.load_weights(place.shared / "own.weights.h5")
    if place.strategy is not None:
        with pytest.raises(ValueError, match="export: each process has only its own stages of the model"):
            other.export(place.shared / "exported", verbose=False)
    return {"found": results, "loaded": state(place, other)}
