"""Models of any size, described on every process and held in part."""

import contextlib
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.model_parallel.device_scope import device_scope
from tfdist.private.keras import tf_core
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.described_variables import ElsewhereError, allocate, describing, is_described, leave_to

described_variables.install()


def network(units=4):
    return keras.Sequential(
        [keras.Input((units,)), *(keras.layers.Dense(units, name=f"d{place}") for place in range(3))]
    )


def described(units=4):
    with describing():
        return network(units)


def test_a_model_of_many_gigabytes_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with describing():
        model = network(30_000)  # 10 GB
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        inputs = keras.Input((30_000,))
        around = keras.Model(inputs, keras.layers.Dense(2)(model(inputs)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB, at most"
    assert model.count_params() == 3 * 30_000 * 30_001
    assert around.output_shape == (None, 2)
    assert all(is_described(variable) for variable in model.variables)
    assert [tuple(variable.shape) for variable in model.variables[:2]] == [(30_000, 30_000), (30_000,)]
    model.summary(print_fn=lambda text: None)


def test_values_are_those_that_the_whole_model_would_have():
    keras.utils.set_random_seed(0)
    expected = network().get_weights()
    keras.utils.set_random_seed(0)
    model = described()
    for variable in reversed(model.variables):  # in any order
        allocate(variable)
    for weight, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_layer_frozen_before_allocation_can_be_unfrozen():
    model = described()
    model.layers[0].trainable = False
    for variable in model.variables:
        allocate(variable)
    assert not model.layers[0].kernel.trainable
    model.layers[0].trainable = True
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 4])))
    assert all(
        gradient is not None
        for gradient in tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor", "lion", "muon"])
def test_optimizer_built_before_allocation_updates_like_plain_keras(name):
    models = []
    for make in (network, described):
        keras.utils.set_random_seed(0)
        model = make()
        optimizer = keras.optimizers.get(name)
        with describing() if make is described else contextlib.nullcontext():
            optimizer.build(model.trainable_variables)
        for variable in (*model.variables, *optimizer.variables):
            allocate(variable)
        for step in range(3):
            optimizer.apply(
                [tf.ones_like(weight) * (step + 1) for weight in model.trainable_variables], model.trainable_variables
            )
        models.append(model)
    for weight, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_assigned_value_survives_allocation():
    model = described()
    model.layers[0].kernel.assign(np.ones((4, 4)))
    assert [is_described(weight) for weight in model.variables] == [False] + [True] * 5
    for variable in model.variables:
        allocate(variable)
    np.testing.assert_array_equal(model.layers[0].kernel, np.ones((4, 4)))


def test_use_of_variable_of_another_process_raises():
    model = described()
    kernel = model.layers[1].kernel
    for do in (lambda: leave_to(kernel, "stage 1"), lambda: None):
        do()
        for use in (
            lambda: kernel.numpy(),
            lambda: model.get_weights(),
            lambda: model(np.ones((1, 4))),
            lambda: kernel.assign(np.ones((4, 4))),
            tf.function(kernel.__neg__, autograph=False),
        ):
            with pytest.raises(ElsewhereError, match="d1/kernel is held by stage 1, not by this process"):
                use()
    with pytest.raises(ElsewhereError, match=r"tf.train.Checkpoint cannot write or read the variable \S*d1/kernel"):
        tf.train.Checkpoint(kernel=kernel).save("unwritten")
    assert keras.Model(model.inputs, model.layers[1].output).output_shape == (None, 4)


def test_variables_outside_of_context_are_allocated():
    described()
    assert not any(is_described(variable) for variable in network().variables)


def test_seams_of_variables_are_on_one_class():
    """A seam on the class that inherits from it would hide those that are installed later."""
    with device_scope("CPU:0"):
        model = network()
    described_variables.install()
    assert model.built
    assert [name for name, member in vars(keras.Variable).items() if hasattr(member, "__wrapped__")] == []
    assert hasattr(tf_core.Variable._initialize, "__wrapped__")
