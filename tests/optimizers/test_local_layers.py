"""In `fit`: `tests/multiprocess/programs/distributed_optimizer`."""

import keras

from tfdist.optimizers import local_layers


def model_of(*layers):
    return keras.Sequential([keras.layers.Input((3,)), *layers])


def test_synchronized_layers_are_warned_of_once(caplog):
    local = model_of(keras.layers.BatchNormalization())
    inner = model_of(keras.layers.BatchNormalization(synchronized=True, name="the_layer"))
    outer = model_of(inner)
    for model, processes in ((local, 2), (outer, 1), (outer, 2), (outer, 2)):
        local_layers.warn(model, processes)
    assert caplog.text.count("the_layer: synchronized=True has no effect with DistributedOptimizer") == 1
