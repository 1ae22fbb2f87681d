"""Optimizers that hold the variables of some stages only."""

import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.pipeline import keras_pipelines
from tfdist.private.keras import base_optimizer
from tfdist.strategies.divided import divided_updates
from tfdist.strategies.divided.described_variables import allocate, describing, is_elsewhere, leave_to
from tfdist.strategies.divided.optimizer_slots import optimizer_variables
from tfdist.strategies.keras import keras_seams

keras_seams.install()
keras_pipelines.install()

OPTIONS = {
    "average": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_are_those_of_the_whole_model(name):
    gradients = np.random.default_rng(0).normal(size=(5, 2, 3)).astype("float32")
    results = []
    for parts in (False, True):
        with describing():
            variables = [keras.Variable(keras.initializers.Constant(place + 1.0), shape=(3,)) for place in range(2)]
            optimizer = keras.optimizers.Adam(0.1, **OPTIONS[name])
            optimizer.build(variables)
        here = variables[1:] if parts else variables
        for variable in [*variables, *optimizer_variables(optimizer)]:
            is_anothers = parts and (variable is variables[0] or variable.path.startswith(f"adam/{variables[0].name}_"))
            leave_to(variable, "another") if is_anothers else allocate(variable)
        assert [is_elsewhere(variable) for variable in variables] == [parts, False]
        for given in gradients:
            local_gradients = given[1:] if parts else given
            optimizer.apply_gradients(
                [(tf.constant(gradient), variable) for gradient, variable in zip(local_gradients, here, strict=True)]
            )
        optimizer.finalize_variable_values(variables)
        results.append(variables[1].numpy())
    np.testing.assert_array_equal(*results)


def test_a_weight_that_two_stages_hold_counts_once_in_a_norm(ranks, monkeypatch):
    """Two processes with one gradient each and one that both have."""
    thread_local = threading.local()
    monkeypatch.setattr(divided_updates.current_strategy, "current", lambda ability: thread_local.stages)

    def work(group):
        thread_local.stages = types.SimpleNamespace(over_updaters=Bridge(group))
        gradients = [tf.constant([3.0, 4.0]), tf.constant([[1.0, 2.0], [2.0, 0.0 if group.rank else 4.0]])]
        with divided_updates.gradient_shares([0.5, 1.0]):
            return float(base_optimizer.global_norm(gradients))

    assert ranks(2)(work) == [pytest.approx((25 + 25 + 9) ** 0.5)] * 2


def test_rows_are_clipped_by_the_norm_of_the_whole_gradient(ranks, monkeypatch):
    """Two processes with two rows each, dense and sparse, and a gradient of their own."""
    thread_local = threading.local()
    monkeypatch.setattr(divided_updates.current_strategy, "current", lambda ability: thread_local.stages)
    divided_updates.install()

    def work(group):
        thread_local.stages = types.SimpleNamespace(over_parts=Bridge(group))
        rows = tf.constant([[3.0], [0.0]] if group.rank else [[0.0], [4.0]])
        slices = tf.IndexedSlices(rows / 10, tf.constant([0, 1]), tf.constant([2, 1]))
        with divided_updates.gradient_shares([1.0] * 3, [1.0, 0.0, 1.0]):
            dense, own, sparse = keras.optimizers.SGD(clipnorm=1.0)._clip_gradients([rows, tf.constant([2.0]), slices])
        return dense.numpy().ravel(), own.numpy(), tf.convert_to_tensor(sparse).numpy().ravel()

    for (dense, own, sparse), rows in zip(ranks(2)(work), ([0.0, 4.0], [3.0, 0.0]), strict=True):
        np.testing.assert_allclose(dense, np.array(rows) / 5)
        np.testing.assert_allclose(own, [1.0])
        np.testing.assert_allclose(sparse, np.array(rows) / 10, err_msg="its norm is 0.5")


def test_parts_that_several_processes_have_are_clipped_once(ranks, monkeypatch):
    """Four processes are two pairs, each of which has both parts of a gradient of norm 5."""
    thread_local = threading.local()
    monkeypatch.setattr(divided_updates.current_strategy, "current", lambda ability: thread_local.stages)
    divided_updates.install()

    def work(group):
        thread_local.stages = types.SimpleNamespace(over_parts=Bridge(group))
        with divided_updates.gradient_shares([0.25], [0.5]):
            (part,) = keras.optimizers.SGD(clipnorm=1.0)._clip_gradients([tf.constant([3.0 + group.rank % 2])])
        return part.numpy().tolist()

    assert ranks(4)(work) == [[pytest.approx(0.6)], [pytest.approx(0.8)]] * 2


def test_variables_that_their_gradients_replace_have_no_average():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    variables[1].overwrite_with_gradient = True  # as the ranges of float8
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=None)
    optimizer.build(variables)
    optimizer.apply([tf.constant([2.0, 2.0]), tf.constant([7.0])], variables)
    assert [variable.numpy().tolist() for variable in variables] == [[0.0, 1.0], [7.0]]
