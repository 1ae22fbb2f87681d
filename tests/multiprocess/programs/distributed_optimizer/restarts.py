"""Files, and training that goes on where it was."""

import os

import keras
import pytest
import tensorflow as tf
from interrupting import Interrupts
from world import (
    FOLDER,
    STEPS,
    X,
    Y,
    assert_alike,
    assert_equal,
    fit,
    make_model,
    plain_model,
    rank,
    share,
)

import tfdist


def saved():
    """Files are those of plain Keras, with and without tfdist, and training goes on where it was."""
    path = os.path.join(FOLDER, f"model-{rank}.keras")
    wrapped = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    fit(wrapped, share(X), share(Y)).save(path)
    config = keras.optimizers.serialize(wrapped.optimizer)
    assert config == keras.optimizers.serialize(keras.optimizers.SGD.from_config(wrapped.optimizer.get_config()))
    assert type(keras.optimizers.deserialize(config)) is keras.optimizers.SGD
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert_equal(loaded.optimizer, wrapped.optimizer, 0)
    tfdist.DistributedOptimizer(loaded.optimizer)
    expected = fit(fit(plain_model(keras.optimizers.SGD(0.1, momentum=0.9)), X, Y), X, Y)
    assert_equal(fit(loaded, share(X), share(Y)), expected, 1e-7)


def resumed():
    """The root alone loads a model with its optimizer, and the others get all of it."""
    path = os.path.join(FOLDER, "resumed.keras")
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    if rank == 0:
        fit(model, X, Y)
        model.save(path)
        model = keras.models.load_model(path)
    model.compile(tfdist.DistributedOptimizer(model.optimizer), model.loss)
    seen = []
    begins = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: (
            seen or seen.extend(variable.numpy() for variable in model.optimizer.variables)
        )
    )
    fit(model, share(X), share(Y), epochs=1, callbacks=[tfdist.callbacks.BroadcastVariables(), begins])
    for value in seen:
        everyone = tfdist.all_gather(tf.constant(value[None])).numpy()
        assert (everyone == everyone[:1]).all()
    assert int(seen[0]) == 2 * STEPS, "the root's iterations"
    assert_alike(model)


def committed():
    """Training that was interrupted goes on where it was, with all that each process had kept back."""
    # Without compression a process keeps nothing back: only in sweeps.
    for compression in ([None] if os.environ.get("TEST_SWEEP") else []) + [tfdist.compression.TopK(0.25)]:
        place = os.path.join(FOLDER, f"committed-{compression is None}")

        def made(compression=compression, **how):
            optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression)
            return make_model(optimizer, units=300, **how)

        expected = fit(made(), share(X), share(Y), epochs=4)
        with pytest.raises(KeyError, match="interrupted"):
            fit(made(), share(X), share(Y), epochs=4, callbacks=[tfdist.callbacks.CommitState(place), Interrupts(2)])
        tfdist.barrier()
        again = made()
        for variable in again.variables:
            variable.assign(variable + rank)  # what it begins with does not count
        history = fit(again, share(X), share(Y), epochs=4, callbacks=[tfdist.callbacks.CommitState(place)])
        assert again.history.epoch == [2, 3], history
        assert_alike(again)
        assert_equal(again, expected)
        assert_equal(again.optimizer, expected.optimizer)
        tfdist.barrier()
        assert not os.path.exists(place)
        tfdist.barrier()
    commits = [tfdist.callbacks.CommitState(place, save_freq=1), Interrupts(batch=0)]
    with pytest.raises(KeyError, match="interrupted"):
        fit(made(run_eagerly=True), share(X), share(Y), callbacks=commits)
    tfdist.barrier()
    again = made(run_eagerly=True)
    for variable in again.variables:
        variable.assign(variable + rank)
    fit(again, share(X), share(Y), epochs=1, callbacks=[tfdist.callbacks.CommitState(place)])
    assert_alike(again)
    tfdist.barrier()
    if rank == 0:
        os.makedirs(place)
        with open(os.path.join(place, "latest.weights.h5"), "w") as file:
            file.write("not a file of weights")
    tfdist.barrier()
    with pytest.raises(RuntimeError, match=r"cannot be read: |see the error of rank 0"):
        fit(made(), share(X), share(Y), callbacks=[tfdist.callbacks.CommitState(place)])
