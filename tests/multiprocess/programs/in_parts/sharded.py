"""`AllReduceStrategy(shard="optimizer")` against plain Keras; a check for each name in TEST_CASES."""

import gc
import os
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from comparing import assert_alike, assert_close
from interrupting import Interrupts
from own_steps import Gan, stepping

import tfdist
from tfdist.private import tensorflow as private
from tfdist.strategies.divided import weight_parts

FOLDER = sys.argv[1]
ROWS, BATCH = 46, 10  # a last batch of 6 rows

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
generator = np.random.default_rng(0)
X = np.concatenate([generator.normal(size=(ROWS, 5)), generator.integers(0, 7, (ROWS, 2))], axis=1)
Y = generator.normal(size=(ROWS, 3))
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)  # of arrays Keras traces functions in each `fit`


def averages():
    """An optimizer that leaves weights out of the decay by their names, one that is cut among them."""
    optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    )
    optimizer.exclude_from_weight_decay(var_names=["embeddings", "bias"])
    return optimizer


def momentum(**how):
    """An optimizer that has slots, and less to trace than Adam."""
    return keras.optimizers.SGD(0.1, momentum=0.9, **how)


OPTIMIZERS = {
    "averages": averages,
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=256.0, dynamic_growth_steps=3),
    "factored": lambda: keras.optimizers.Adafactor(0.01),
}
MORE = {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.Nadam(0.01),
    "centered": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "layers": lambda: keras.optimizers.Lamb(0.01),
    "signs": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2),
    "noisy": lambda: tfdist.optimizers.GradientNoise(keras.optimizers.Adam(0.01), structure="isotropic", stddev=0.1),
}
if hasattr(keras.optimizers, "Muon"):
    MORE["muon"] = lambda: keras.optimizers.Muon(0.01)


def strategy(**arguments):
    return tfdist.AllReduceStrategy(
        **{"devices": ["CPU:0"], "shard": os.environ.get("TEST_SHARD", "optimizer"), **arguments}
    )


def network():
    """Dense layers, a constraint, and an embedding, whose gradients are sparse rows. Two weights are cut."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((7,))
    words = keras.layers.Embedding(700, 50, name="words")(inputs[:, 5:])
    words = keras.layers.Dense(330, activation="tanh", name="wide")(keras.layers.Flatten()(words))
    hidden = keras.layers.Dense(6, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.0))(inputs[:, :5])
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(keras.layers.Concatenate()([words, hidden])))


def compiled(optimizer, made=None):
    with (made or tf.distribute.get_strategy()).scope():
        model = network()
        model.compile(optimizer(), "mse", run_eagerly=made is None)  # plain Keras traces longer than it trains
    return model


def fit(model, epochs=2, **how):
    return model.fit(DATA, epochs=epochs, verbose=0, **how).history["loss"]


def assert_as_plain(model, optimizer, losses, epochs=2, **how):
    """All ranks have the same weights, which are those of plain Keras; one rank trains that."""
    assert_alike(model)
    weights = model.get_weights()  # on all processes, which may each have some rows
    if rank == 0:
        plain = compiled(optimizer)
        np.testing.assert_allclose(losses, fit(plain, epochs, **how), rtol=1e-6)
        assert_close(weights, plain.get_weights())
    tfdist.barrier()


def held(optimizer):
    """The elements of an optimizer's variables that this process has, and the largest part."""
    dealing = optimizer._distribution_strategy.extended.dealing(optimizer)
    parts = [
        dealing.part(variable)
        for variable in optimizer.variables
        if variable._value is not None or dealing.part(variable) is not variable
    ]
    sizes = [int(np.prod(part.shape)) for part in parts]
    return sum(sizes), max(sizes)


def equal(optimizers=OPTIMIZERS):
    made = strategy()
    for optimizer in optimizers.values():
        model = compiled(optimizer, made)
        assert_as_plain(model, optimizer, fit(model))


def sweep():
    equal(MORE)
    for how in ({"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": True}):
        model = compiled(keras.optimizers.Adam, strategy())
        model.compile(model.optimizer, "mse", **how)
        assert_as_plain(model, keras.optimizers.Adam, fit(model))


def memory():
    """Each rank holds Adam's variables of its own weights, or whole ones, if the optimizer looks at whole ones."""
    made = strategy()
    for optimizer, largest in ((keras.optimizers.Adam, 2000), (keras.optimizers.Lamb, 2 * 35_000)):
        model = compiled(optimizer, made)
        with made.scope():
            model.optimizer.build(model.trainable_variables)
        made.extended.place(model)
        counts = [int(count) for count in tfdist.all_gather(tf.constant([held(model.optimizer)[0]]))]
        everything = sum(int(np.prod(variable.shape)) for variable in model.optimizer.variables)
        assert sum(counts) == everything + 2 * (size - 1), (counts, everything)  # the rate and the number of updates
        assert max(counts) <= everything / size + largest + 2, counts
        unread = {str(error_of(variable)) for variable in model.optimizer.variables if variable._value is None}
        expected = "all processes, of which each" if largest == 2000 else r"rank \d, not by this process"
        assert any(re.search(f"is held by {expected}", text) for text in unread), unread


def memory_after_fit():
    """Each process has its share of what is divided, by all variables that exist; with weights in parts, too."""
    for shard in ("optimizer", "weights"):
        before = live_variables()
        model = compiled(keras.optimizers.Adam, strategy(shard=shard))
        model.compile(model.optimizer, "mse", run_eagerly=True)
        model.fit(DATA.take(1), verbose=0)
        weights = model.trainable_weights
        dealing = model.optimizer._distribution_strategy.extended.dealing(model.optimizer)
        views = [] if shard == "weights" else [private.copies(dealing.part(weight))[0] for weight in weights]
        known = {id(each) for each in (*before, *views)}  # a view of rows has no memory of its own
        made = sum(size_of(each) for each in live_variables() if id(each) not in known)
        everything = sum(map(size_of, weights))
        in_parts = sum(size_of(weight) for weight in weights if weight_parts.of(weight) is not None)
        assert (in_parts > 0.9 * everything) is (shard == "weights"), in_parts
        share, whole = (2 * everything + in_parts) / size, everything - in_parts
        assert 0.85 * share < made - whole < 1.15 * share, (shard, made, share, whole)


def live_variables():
    """All variables of TensorFlow that exist, other than those that have components."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, tf.Variable)]
    return [each for each in found if not private.is_distributed_variable(each)]


def size_of(variable):
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


def error_of(variable):
    with pytest.raises(RuntimeError) as raised:
        variable.numpy()
    return raised.value


def saved():
    """Files are those of plain Keras, both ways, and training goes on with the optimizer's state."""
    path = os.path.join(FOLDER, f"model-{size}.keras")
    made, optimizer = strategy(), lambda: momentum(use_ema=True)
    model = compiled(optimizer, made)
    fit(model)
    model.save(path)
    tfdist.barrier()
    if rank == 0:
        plain, file = compiled(optimizer), keras.models.load_model(path)
        fit(plain)
        for variable, other in zip(plain.optimizer.variables, file.optimizer.variables, strict=True):
            np.testing.assert_allclose(other.numpy(), variable.numpy(), rtol=0, atol=1e-9, err_msg=variable.path)
        plain.save(path.replace("model", "plain"))
    tfdist.barrier()
    with made.scope():
        models = [model, keras.models.load_model(path), keras.models.load_model(path.replace("model", "plain"))]
    path_of_weights = path.replace(".keras", ".weights.h5")
    model.save_weights(path_of_weights)
    models.append(compiled(optimizer, made))
    models[-1].run_eagerly = True
    with made.scope():
        models[-1].optimizer.build(models[-1].trainable_variables)
    models[-1].load_weights(path_of_weights)
    for other in models:
        fit(other, 1)
        assert_alike(other)
        assert_close(other, model.get_weights())
    models[1].load_weights(path_of_weights)  # and the optimizer's variables, which have changed since
    fit(models[1], 1)
    assert_alike(models[1])
    assert_close(models[1], model.get_weights())
    if size > 1:
        assert all(held(other.optimizer) == held(model.optimizer) for other in models)


def restarted():
    place = os.path.join(FOLDER, f"backup-{size}")
    with pytest.raises(KeyError, match="interrupted"):
        fit(
            compiled(momentum, strategy()),
            3,
            callbacks=[keras.callbacks.BackupAndRestore(place), Interrupts(2)],
        )
    tfdist.barrier()
    model = compiled(momentum, strategy())
    fit(model, 3, callbacks=[keras.callbacks.BackupAndRestore(place)])
    assert_alike(model)
    weights = model.get_weights()
    if rank == 0:
        plain = compiled(momentum)
        fit(plain, 3)
        assert_close(weights, plain.get_weights())
    tfdist.barrier()


def callbacks():
    """Those that swap, keep and write weights, with validation."""

    def optimizer():
        return momentum(use_ema=True, ema_momentum=0.5)

    def given(name):
        path = os.path.join(FOLDER, f"{name}-{size}.keras")
        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True),
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
        ]

    def how(name):
        return {"callbacks": given(name), "validation_data": tf.data.Dataset.from_tensors((X[:9], Y[:9]))}

    model = compiled(optimizer, strategy())
    losses = fit(model, 3, **how("sharded"))
    assert_as_plain(model, optimizer, losses, 3, **(how("plain") if rank == 0 else {}))
    if rank == 0:
        models = [
            keras.models.load_model(os.path.join(FOLDER, f"{name}-{size}.keras")) for name in ("sharded", "plain")
        ]
        assert_close(models[0], models[1].get_weights())
    tfdist.barrier()


def loops():
    """Steps of one's own: two optimizers, `Strategy.run`, and layers that are frozen after some updates."""
    made = strategy()
    with made.scope():
        gan = Gan()
        gan.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9))
        gan.build((None, 5))
    gan.fit(tf.data.Dataset.from_tensor_slices(X[:, :5]).batch(BATCH), epochs=2, verbose=0)
    assert_alike(gan)
    with made.scope():
        variables = [tf.Variable(np.ones(shape, "float32")) for shape in ((3, 2), (2,), (4,))]
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        optimizer.build(variables)
    made.run(lambda: optimizer.apply([tf.ones_like(variable) for variable in variables], variables))
    assert all((variable.numpy() == 1 - 0.5 * size).all() for variable in variables), variables
    model = compiled(momentum, made)
    step = stepping(made, model)
    for _ in range(3):
        step(tf.constant(X[:8]), tf.constant(Y[:8]))
    assert_alike(model)
    before = model.get_layer("out").kernel.numpy()
    for layer in model.layers:
        layer.trainable = layer.name == "out"
    model.compile(model.optimizer, "mse")
    fit(model, 1)
    assert_alike(model)
    assert (model.get_layer("out").kernel.numpy() != before).all()


def compressed():
    """As without `shard=`, where sums are not encoded again: on two processes. Some weights are not compressed."""

    def clipped():
        return momentum(global_clipnorm=0.1)

    method = tfdist.compression.BFloat16()  # whose roundings are the same in parts
    whole = compiled(clipped, strategy(shard=None, compression=method))
    fit(whole, 3)
    parts = [{"shard": "optimizer"}, {"shard": "weights"}, {"shard": "weights", "gather": "model"}]
    models = []
    for place, arguments in enumerate(parts):
        model = compiled(clipped, strategy(compression=method, **arguments))
        backup = keras.callbacks.BackupAndRestore(os.path.join(FOLDER, f"compressed-{place}-{size}"))
        with pytest.raises(KeyError, match="interrupted"):
            fit(model, 3, callbacks=[backup, Interrupts(2)])
        tfdist.barrier()
        made = strategy(compression=method, **arguments)  # takes over the residuals that were saved
        models.append(compiled(clipped, made))
        fit(models[-1], 3, callbacks=[backup])
        traffic = made.compression()
        assert {path.split("/")[0] for path in traffic} == {"wide"}, traffic
        (bytes_of,) = traffic.values()
        assert 2 < bytes_of["plain_bytes"] / bytes_of["sent_bytes"] < 4.1, bytes_of  # of float64
    for model in models:
        assert_alike(model)
        assert_close(model, whole.get_weights(), 1e-9 if size == 2 else 0.02)
    scaled = compiled(OPTIMIZERS["scaled"], strategy(shard="weights", compression=method))
    with pytest.raises(ValueError, match="does not work with a LossScaleOptimizer"):
        fit(scaled)


def noisy():
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, name="sgd")


def refused():
    for arguments, message in (
        ({"shard": "stages"}, "must be None, 'optimizer' or 'weights'; got 'stages'"),
        ({"gather": "once"}, r"gather=…\) must be 'layer' or 'model'; got 'once'"),
        ({"gather": "model"}, r"gather='model'\) needs shard='weights'; got shard='optimizer'"),
        ({"delay": 1}, "does not work with delay=1"),
        ({"compression": tfdist.compression.TopK(0.1)}, r"TopK.* compresses a gradient as a whole.*Use Float16"),
        ({"compression": tfdist.compression.Int8(), "mesh": tfdist.Mesh(data=size)}, "does not work with compression="),
        ({"devices": ["CPU:0", "CPU:1"]}, "needs one device in each process"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy(**arguments)
    with pytest.raises(ValueError, match="no gradients of its own of which to measure the variance"):
        fit(compiled(lambda: tfdist.optimizers.GradientNoise(noisy(), ratio=4), strategy()))
    with pytest.raises(ValueError, match="shard="):
        fit(compiled(keras.optimizers.SGD, strategy()), callbacks=[tfdist.callbacks.GradientNoiseScale()])


def mismatched():
    strategy(shard="optimizer" if rank else None)


def alone():
    """The chief alone saves, while others wait for something else."""
    made = strategy()
    model = compiled(keras.optimizers.Adam, made)
    with made.scope():
        model.optimizer.build(model.trainable_variables)
    if rank == 0:
        model.save_weights(os.path.join(FOLDER, "alone.weights.h5"))
    tfdist.barrier()


def endless():
    """Trains until it is killed."""
    model = compiled(keras.optimizers.Adam, strategy())
    fit(model, 1)
    print("READY", flush=True)
    fit(model, 10**6)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
