"""Replicas on other devices than the host's, which stand in for GPUs: where host calls and shares of batches are."""

import contextlib
import hashlib

import keras
import numpy as np
import tensorflow as tf
from checking import run_checks

import tests.devices  # noqa: F401  (divides the CPU)
import tfdist
from tests.model_parallel.executed import executed, needed_by, places

X = {"rows": np.arange(36).reshape(18, 2) % 5, "numbers": np.random.default_rng(0).normal(size=(18, 3))}
Y = np.random.default_rng(1).normal(size=(18, 1))
weights = hashlib.sha256()
"""Hash of all trained weights."""


def network(scope, policy=None, wrapped=lambda optimizer: optimizer):
    """A model with sparse gradients, state of layers and metrics."""
    keras.utils.set_random_seed(0)
    with scope:
        rows, numbers = keras.Input((2,), name="rows", dtype="int32"), keras.Input((3,), name="numbers")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(rows))
        hidden = keras.layers.Concatenate()([embedded, keras.layers.BatchNormalization()(numbers)])
        model = keras.Model([rows, numbers], keras.layers.Dense(1, dtype=policy)(hidden))
        optimizer = wrapped(keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if policy else optimizer, "mse")
    return model


def assert_placed(operations, devices):
    """Every host call is on the host, and the model is not."""
    calls = [kind for kind in ("PyFunc", "TfdistSum") if places(operations, kind)]
    assert calls, "no host call was found"
    for kind in calls:
        assert set(places(operations, kind)) == {"CPU:0"}, (kind, places(operations, kind))
    assert set(places(operations, "MatMul")) == set(devices), places(operations, "MatMul")
    if tf.test.is_built_with_cuda():  # which needs no GPU; other wheels have no such kernels
        there = [operation for operation in operations if operation.device in devices]
        without = [operation for operation in there if not operation.has_gpu_kernel and "Dataset" not in operation.kind]
        assert not without, without


def assert_packed(operations, devices):
    """Gradients leave a device as one vector of a type, where the host sums them in machine code."""
    if places(operations, "TfdistSum"):
        there = [operation for operation in operations if operation.device in devices]
        leaving = [operation.kind for operation in there if "CPU:0" in operation.receivers]
        assert "ConcatV2" in leaving, leaving
        assert not [kind for kind in leaving if "MatMul" in kind], leaving


def assert_cut(operations, devices):
    """Batches, which have three components, leave the host as shares alone."""
    leaving = [operation for operation in operations if operation.device == "CPU:0" and operation.receivers]
    whole = [operation for operation in leaving if operation.kind.startswith(("Iterator", "Optional"))]
    assert not whole, whole
    for device in devices:
        shares = {
            operation.name.rpartition("tfdist_share")[2]
            for operation in leaving
            if device in operation.receivers and operation.kind == "GatherV2"
        }
        assert len(shares) == 3, (device, shares)


def assert_shares(strategy, devices):
    """What a replica's device has of a batch of 8 is its share, in bytes."""
    dataset = tf.data.Dataset.from_tensor_slices(X["numbers"]).batch(8).take(1)
    (value,) = strategy.experimental_distribute_dataset(dataset)
    share = -(-8 // strategy.num_replicas_in_sync) * X["numbers"][0].nbytes
    parts = strategy.experimental_local_results(value)
    for part, device in zip(parts, devices, strict=True):
        assert part.device.endswith(device)
        assert part.numpy().nbytes <= share, (part.shape, share)


def note(model):
    """Adds the weights to what must be equal on all ranks."""
    trained = b"".join(weight.numpy().tobytes() for weight in model.trainable_weights)
    weights.update(hashlib.sha256(trained).digest())


def check(strategy, policy=None, devices=("CPU:1",), packs=False):
    model = network(strategy.scope(), policy)
    operations = executed(lambda: model.fit(X, Y, batch_size=8, validation_data=(X, Y), verbose=0))
    assert_placed(operations, devices)
    if packs:
        assert_packed(operations, devices)
    assert_cut(operations, devices)
    assert_shares(strategy, devices)
    note(model)
    for variable in model.variables:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


def all_reduce():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"]), packs=True)


def scaled_losses():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"]), "mixed_float16", packs=True)


def two_replicas_in_each_process():
    check(tfdist.AllReduceStrategy(devices=["CPU:1", "CPU:2"]), devices=["CPU:1", "CPU:2"])


def compressed():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"], compression=tfdist.compression.Int8()))


def delayed():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"], delay=1))


def relocated():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"], cpu_relocation=True))


def sharded():
    for what in ("optimizer", "weights"):
        check(tfdist.AllReduceStrategy(devices=["CPU:1"], shard=what))


def local_sgd():
    check(tfdist.LocalSGDStrategy(devices=["CPU:1", "CPU:2"], sync_every=2), devices=["CPU:1", "CPU:2"])


def gossip():
    check(tfdist.GossipStrategy(devices=["CPU:1", "CPU:2"]), devices=["CPU:1", "CPU:2"])


def own_step(strategy, model):
    """A step as loops of one's own make it."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - tf.cast(y, tf.float32)) ** 2) / 8
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return tf.function(lambda x, y: strategy.run(step, (x, y)))


def loop():
    strategy = tfdist.AllReduceStrategy(devices=["CPU:1"])
    model = network(strategy.scope())
    batches, run = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), own_step(strategy, model)

    def train():
        for batch in strategy.experimental_distribute_dataset(batches):
            run(*batch)

    assert_placed(executed(train), ["CPU:1"])
    note(model)


def overlapping():
    """A sum of late layers' gradients begins, and they are copied to the host, before early layers have theirs."""
    devices = ["CPU:1", "CPU:2"]
    strategy = tfdist.AllReduceStrategy(devices=devices, algorithm="ring")
    with strategy.scope():
        layers = [keras.layers.Dense(width, name=name) for name, width in (("early", 600), ("late", 600), ("last", 1))]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", "mse")
    step = own_step(strategy, model)
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((X["numbers"], Y)))))
    operations = executed(lambda: step(*batch))
    names = {kind: [one.name for one in operations if one.name.endswith(kind)] for kind in ("tfdist_post", "finish")}
    assert [len(calls) for calls in names.values()] == [1, 1], names
    for calls, early in zip(names.values(), (False, True), strict=True):
        needed = {name for name in needed_by(operations, calls[0]) if "gradient_tape" in name}
        assert any("late" in name for name in needed), needed
        assert any("early" in name for name in needed) == early, needed
    assert_placed(operations, devices)


def optimizer():
    """Without a strategy the graph is on the device that the program has chosen."""
    tfdist.init()
    with tf.device("CPU:1"):
        model = network(contextlib.nullcontext(), wrapped=tfdist.DistributedOptimizer)
        operations = executed(lambda: model.fit(X, Y, batch_size=9, verbose=0))
    assert_placed(operations, ["CPU:1"])
    note(model)


def stages():
    tfdist.init()
    strategy = tfdist.PipelineStrategy(stages=tfdist.size(), micro_batches=2, devices=["CPU:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(7, "tanh", name=f"d{place}") for place in range(3)]
        model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    assert_placed(executed(lambda: model.fit(X["numbers"], Y, batch_size=8, verbose=0)), ["CPU:1"])


run_checks(globals(), digest=lambda name: weights.hexdigest())
