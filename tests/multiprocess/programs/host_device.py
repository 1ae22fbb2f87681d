"""Replicas on other devices than the host's, which stand in for GPUs: where host calls and shares of batches are."""

import hashlib

import keras
import numpy as np
from checking import run_checks

import tests.devices  # noqa: F401  (divides the CPU)
import tfdist
from tests.model_parallel.executed import executed, places

X = {"rows": np.arange(36).reshape(18, 2) % 5, "numbers": np.random.default_rng(0).normal(size=(18, 3))}
Y = np.random.default_rng(1).normal(size=(18, 1))
weights = hashlib.sha256()
"""Hash of all trained weights."""


def trained(strategy, policy=None):
    """The operations of a training with sparse gradients, state of layers and metrics."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        rows, numbers = keras.Input((2,), name="rows", dtype="int32"), keras.Input((3,), name="numbers")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(rows))
        hidden = keras.layers.Concatenate()([embedded, keras.layers.BatchNormalization()(numbers)])
        model = keras.Model([rows, numbers], keras.layers.Dense(1, dtype=policy)(hidden))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if policy else optimizer, "mse")
    operations = executed(lambda: model.fit(X, Y, batch_size=8, validation_data=(X, Y), verbose=0))
    return model, operations


def check(strategy, policy=None, devices=("CPU:1",)):
    """Every host call is on the host, the model is not, and batches are cut before they leave the host."""
    model, operations = trained(strategy, policy)
    assert set(places(operations, "PyFunc")) == {"CPU:0"}, places(operations, "PyFunc")
    assert set(places(operations, "MatMul")) == set(devices), places(operations, "MatMul")
    assert {
        operation.device
        for operation in operations
        if "tfdist_share" in operation.name and operation.kind == "GatherV2"
    } == {"CPU:0"}
    weights.update(hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).digest())
    for variable in model.variables:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy())


def all_reduce():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"]))


def scaled_losses():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"]), "mixed_float16")


def two_replicas_in_each_process():
    check(tfdist.AllReduceStrategy(devices=["CPU:1", "CPU:2"]), devices=["CPU:1", "CPU:2"])


def compressed():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"], compression=tfdist.compression.Int8()))


def delayed():
    check(tfdist.AllReduceStrategy(devices=["CPU:1"], delay=1))


def local_sgd():
    check(tfdist.LocalSGDStrategy(devices=["CPU:1"], sync_every=2))


def gossip():
    check(tfdist.GossipStrategy(devices=["CPU:1"]))


run_checks(globals(), digest=lambda name: weights.hexdigest())
