"""What callbacks and saving do on two processes. Every rank works in a folder of its own, as on two machines."""

import contextlib
import functools
import io
import os
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.AllReduceStrategy()
folder = Path(sys.argv[1]) / f"rank{strategy.rank}"
folder.mkdir()
chief = strategy.rank == 0
digits = load_digits()
X, Y = (digits.data / 16.0).astype("float32")[:200], digits.target[:200]


def make(optimizer=None):
    """A model; by default with an optimizer that has slots, and less to trace than Adam."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(10),
            ]
        )
        optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@functools.cache
def begun():
    model = make()
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model, state(model)


def shared():
    """The model of checks that need none of their own, as it began: so its steps are traced once for all of them."""
    model, values = begun()
    for variable, value in zip(variables(model), values, strict=True):
        variable.assign(value)
    return model


def fit(model, epochs=2, callbacks=(), **arguments):
    """Trains on a dataset: of arrays Keras traces functions in each call."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(50)
    return model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks), **arguments)


def equal_on_all_ranks(values):
    flat = np.concatenate([np.asarray(value, np.float64).ravel() for value in values])
    gathered = strategy.gather(tf.constant(flat[np.newaxis]), axis=0).numpy()
    return all((row == gathered[0]).all() for row in gathered)


def equal_values(values, other_values):
    return all((a == b).all() for a, b in zip(values, other_values, strict=False))


def variables(model):
    return *model.variables, *model.optimizer.variables


def state(model):
    return [variable.numpy() for variable in variables(model)]


def weights_are_identical_to_the_last_bit():
    model = make("adam")
    model.fit(X, Y, batch_size=50, epochs=2, verbose=0)  # in an order that the chief draws
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks(model.optimizer.variables)


def model_checkpoint_is_written_by_the_chief():
    model = shared()
    path = folder / "checkpoints"
    path.mkdir()
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path / "{epoch}.keras")])
    assert sorted(p.name for p in path.iterdir()) == (["1.keras", "2.keras"] if chief else []), list(path.iterdir())
    if chief:
        loaded = keras.models.load_model(path / "2.keras")
        for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
            assert (ours == theirs).all()


def checkpoint_in_the_middle_of_an_epoch():
    model = shared()
    path = folder / "often.weights.h5"
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path, save_freq=3, save_weights_only=True)])
    assert path.exists() == chief


def backup_and_restore():
    keras.utils.set_random_seed(1)
    expected = make("adam")
    initial = expected.get_weights()
    # With a callback as below, by which steps have the same graph, and Adam the same noise in the bias before moments.
    fit(
        expected,
        epochs=4,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: None)],
    )

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    interrupted = make("adam")
    interrupted.set_weights(initial)
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    try:
        fit(interrupted, epochs=4, callbacks=[backup, Interruption()])
        raise AssertionError("not interrupted")
    except RuntimeError:
        pass
    assert (folder / "backup").exists() == chief
    resumed = make("adam")
    seen = []
    noting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    fit(resumed, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(folder / "backup"), noting])
    assert seen == [2, 3], seen
    assert equal_on_all_ranks(resumed.get_weights())
    for ours, theirs in zip(resumed.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def writing_callbacks():
    model = shared()
    callbacks = [keras.callbacks.TensorBoard(folder / "board"), keras.callbacks.CSVLogger(folder / "log.csv")]
    fit(model, callbacks=callbacks, validation_data=tf.data.Dataset.from_tensors((X[:50], Y[:50])))
    assert (folder / "board").exists() == chief
    assert (folder / "log.csv").exists() == chief
    if chief:
        assert len((folder / "log.csv").read_text().splitlines()) == 3


def early_stopping_and_plateau():
    model = shared()
    callbacks = [
        keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=0, factor=0.5, cooldown=0),
    ]
    history = fit(model, epochs=6, callbacks=callbacks).history
    assert len(history["loss"]) == 2, history
    assert equal_on_all_ranks([history["loss"], history["learning_rate"]])
    assert equal_on_all_ranks(model.get_weights())


def one_rank_wishes_to_stop_in_the_middle_of_an_epoch():
    """All stop before the next step, which nobody takes; an evaluation on the way there is not ended by it."""
    began, evaluated = [], []

    class Wish(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            began.append(batch)
            if len(began) == 7:
                evaluated.append(self.model.evaluate(X, Y, batch_size=50, verbose=0, callbacks=[counting]))

        def on_train_batch_end(self, batch, logs=None):
            if not chief and self.model.optimizer.iterations == 6:
                self.model.stop_training = True

    batches = []
    counting = keras.callbacks.Callback()
    counting.on_test_batch_end = lambda batch, logs=None: batches.append(batch)
    model = shared()
    history = fit(model, epochs=5, callbacks=[Wish()]).history
    assert len(history["loss"]) == 2, history
    assert int(model.optimizer.iterations.numpy()) == 6
    assert batches == [0, 1, 2, 3]
    assert len(evaluated) == 1
    assert equal_on_all_ranks(state(model))
    fit(model, epochs=1)
    assert int(model.optimizer.iterations.numpy()) == 10


def save_and_load():
    model = shared()
    fit(model)
    path = folder.parent / "shared.keras"
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    assert equal_on_all_ranks(loaded.get_weights())
    for ours, theirs in zip(state(model), state(loaded), strict=True):
        assert (ours == theirs).all()
    fit(loaded)
    assert equal_on_all_ranks(loaded.get_weights())
    np.testing.assert_allclose(loaded.predict(X, verbose=0), loaded(X), rtol=1e-4, atol=1e-4)


def the_chief_alone_saves():
    model = shared()
    fit(model)
    if chief:
        model.save(folder / "alone.keras")
        model.export(folder / "exported", verbose=False)
        exported = tf.saved_model.load(folder / "exported")
        np.testing.assert_allclose(exported.serve(X[:5]), model(X[:5]), rtol=1e-5, atol=1e-5)
    fit(model, epochs=1)


def weights_that_only_the_chief_has():
    model = shared()
    fit(model)
    kept = model.get_weights()
    model.save_weights(folder / "own.weights.h5")
    assert (folder / "own.weights.h5").exists() == chief
    other = make()
    other.load_weights(folder / "own.weights.h5")
    for ours, theirs in zip(kept, other.get_weights(), strict=True):
        assert (ours == theirs).all()
    try:
        other.load_weights(folder / "missing.weights.h5")
        raise AssertionError("no error for a missing file")
    except OSError:
        pass


def what_is_saved_in_several_files_or_not_over_others():
    model = shared()
    fit(model, epochs=1)
    if chief:
        model.save_weights(folder / "sharded.weights.json", max_shard_size=2.1e-6)
        names = [path.name for path in folder.iterdir() if "sharded" in path.name]
        assert len(names) > 2, names
        assert all(name.startswith("sharded") for name in names), names
        kept = folder / "kept.keras"
        kept.write_text("mine")
        try:
            model.save(kept, overwrite=False)  # asks, and nobody answers
        except EOFError:
            pass
        assert kept.read_text() == "mine"


def nan_stops_all():
    model = shared()
    poisoned = X.copy()
    poisoned[0] = np.nan  # seen by one rank
    history = model.fit(
        poisoned, Y, batch_size=50, epochs=3, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    ).history
    assert len(history["loss"]) == 1, history


def all_of_it_inside_of_the_scope():
    with strategy.scope():
        model = make()
        path = folder / "scope"
        path.mkdir()
        callbacks = [
            keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
            keras.callbacks.BackupAndRestore(path / "b"),
        ]
        fit(model, callbacks=callbacks)
        model.save(path / "whole.keras")
        model.save_weights(path / "own.weights.h5")
    assert (path / "whole.keras").exists() == chief
    assert equal_on_all_ranks(state(model))
    fit(model, epochs=1)  # the chief has made no variables that others have not


def a_damaged_backup():
    class Epochs(keras.callbacks.Callback):
        seen = ()

        def on_epoch_begin(self, epoch, logs=None):
            self.seen = (*self.seen, epoch)
            if epoch == 3:
                raise RuntimeError("interrupted")

    def go_on(model):
        epochs = Epochs()
        backup = keras.callbacks.BackupAndRestore(folder / "damaged")
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(model, epochs=5, callbacks=[backup, epochs])
        return epochs.seen

    assert go_on(make()) == (0, 1, 2, 3)
    if chief:
        latest = folder / "damaged" / "latest.weights.h5"
        latest.write_bytes(latest.read_bytes()[:1000])
        (folder / "damaged" / "training_metadata.json").write_text("")
        (folder / "damaged" / ".0123abcd.latest.weights.h5").write_text("unfinished")
    assert go_on(make()) == (2, 3), "the backup before the damaged one is of two epochs"
    if chief:
        assert not list((folder / "damaged").glob(".*")), list((folder / "damaged").iterdir())


def weights_that_are_not_equal():
    class Differs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and not chief:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 1e-6)

    model = shared()
    with pytest.raises(tfdist.MismatchError, match=rf"after epoch 2 .*{model.layers[0].kernel.path} .*rank\(s\) \[1\]"):
        fit(model, epochs=3, callbacks=[Differs()])


def weights_that_one_rank_restores_at_the_end():
    """Or that a program sets between `fit` and `evaluate`."""
    stopping = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1, restore_best_weights=True)
    model = shared()
    with pytest.raises(tfdist.MismatchError, match=r"after the training .*rank\(s\) \[1\]"):
        fit(model, epochs=5, callbacks=[stopping] if chief else [])
    model = shared()
    if not chief:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    with pytest.raises(tfdist.MismatchError, match=r"before evaluate .*rank\(s\) \[1\]"):
        model.evaluate(X, Y, verbose=0)


def arguments_that_differ():
    """Both ranks are told at once which, and what each has; afterwards they go on."""
    model = shared()

    def dataset(rows):
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(50)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return X[:50], Y[:50]

    rows = 100 + 20 * strategy.rank
    for call, said in (
        (
            lambda: model.fit(X[:rows], Y[:rows]),
            "x: arrays of 100 rows on rank(s) [0], arrays of 120 rows on rank(s) [1]",
        ),
        (lambda: model.fit(X, Y, batch_size=rows), "batch_size: 100 on rank(s) [0], 120 on rank(s) [1]"),
        (lambda: model.fit(X, Y, epochs=rows), "epochs: 100 on"),
        (lambda: model.fit(X, Y, initial_epoch=rows, epochs=500), "initial_epoch: 100 on"),
        (lambda: model.fit(X, Y, shuffle=chief), "shuffle: True on rank(s) [0], False on rank(s) [1]"),
        (lambda: model.fit(dataset(rows)), "x: a tf.data.Dataset of 2 batches on rank(s) [0]"),
        (lambda: model.fit(dataset(200).repeat(), steps_per_epoch=rows), "steps_per_epoch: 100 on"),
        (
            lambda: model.fit(dataset(100) if chief else Batches()),
            "a tf.data.Dataset of 2 batches on rank(s) [0], a PyDataset of 2 b",
        ),
        (
            lambda: model.fit(X, Y, validation_data=(X, Y) if chief else None),
            "validation_data: arrays of 200 rows on rank(s) [0], None",
        ),
        (
            lambda: model.fit(X, Y, validation_data=dataset(rows)),
            "validation_data: a tf.data.Dataset of 2 batches on rank(s) [0]",
        ),
        (lambda: model.fit(X, Y, validation_data=(X, Y), validation_freq=rows), "validation_freq: 100 on"),
        (
            lambda: model.fit(X, Y, sample_weight=np.ones(200) if chief else None),
            "sample_weight: given on rank(s) [0], None",
        ),
        (
            lambda: model.evaluate(X[:rows], Y[:rows]),
            "evaluate was called with different arguments on different ranks: x: arrays",
        ),
        (
            lambda: model.predict(X, batch_size=rows),
            "predict was called with different arguments on different ranks: batch_size",
        ),
    ):
        with pytest.raises(tfdist.MismatchError, match=re.escape(said)) as caught:
            call()
        assert str(caught.value).startswith(f"rank {strategy.rank}: "), caught.value
    before = state(model)
    fit(model)
    assert not equal_values(before, state(model))
    assert equal_on_all_ranks(state(model))


def optimizers_that_are_not_equal():
    class Differs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and not chief:
                inner = self.model.optimizer.inner_optimizer
                variable = next(candidate for candidate in inner.variables if differing in candidate.path)
                variable.assign(variable + 0.5)

    for differing in ("learning_rate", "momentum"):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with pytest.raises(tfdist.MismatchError, match=rf"after epoch 2 .*{differing}.* rank\(s\) \[1\]"):
            fit(model, epochs=3, callbacks=[Differs()])


def progress_is_shown_by_the_chief():
    model = shared()
    for arguments, expected in (({}, chief), ({"verbose": 2}, True)):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            model.fit(X, Y, batch_size=50, **arguments)
            model.evaluate(X, Y, batch_size=50, **arguments)
            model.predict(X, batch_size=50, **arguments)
        assert bool(shown.getvalue()) == expected, shown.getvalue()


def an_optimizer_made_outside_of_the_scope():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    fit(model)  # what compile makes, it makes in the model's scope
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"created outside of strategy.scope\(\): the optimizer adam"):
        fit(model)


def begin():
    keras.utils.set_random_seed(3)
    assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)


run_checks(globals(), begin)
begin()  # nothing is left of the last one
