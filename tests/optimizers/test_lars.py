import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.optimizers import LARS

KERNEL, BIAS = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([1.0, -1.0])
STEPS = [
    (np.array([[0.1, 0.2], [-0.3, 0.4]]), np.array([0.5, 0.25])),
    (np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([-0.5, 1.0])),
    (np.zeros((2, 2)), np.zeros(2)),
]


def reference(rate, momentum=0.9, decay=0.0, trust=1e-3, nesterov=False, adapts=(True, False)):
    """By the formulas of the paper."""
    weights, momenta = [KERNEL.copy(), BIAS.copy()], [np.zeros((2, 2)), np.zeros(2)]
    for gradients in STEPS:
        for place, gradient in enumerate(gradients):
            weight, local = weights[place], rate
            if adapts[place]:
                if np.linalg.norm(weight) and np.linalg.norm(gradient):
                    norm = np.linalg.norm(weight)
                    local = rate * trust * norm / (np.linalg.norm(gradient) + decay * norm)
                gradient = gradient + decay * weight
            momenta[place] = momentum * momenta[place] + local * gradient
            weights[place] = weight - (momentum * momenta[place] + local * gradient if nesterov else momenta[place])
    return weights


def updated(optimizer, dtype="float64"):
    variables = [keras.Variable(KERNEL, dtype=dtype, name="kernel"), keras.Variable(BIAS, dtype=dtype, name="bias")]
    optimizer.build(variables)
    step = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    for gradients in STEPS:
        step([tf.constant(tensor, dtype) for tensor in gradients])
    return [tensor.numpy() for tensor in variables]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"momentum": 0.0}, {"momentum": 0.0}),
        ({"weight_decay": 0.1, "trust_coefficient": 0.5}, {"decay": 0.1, "trust": 0.5}),
        ({"nesterov": True, "weight_decay": 0.01}, {"nesterov": True, "decay": 0.01}),
        ({"exclude": ["^ker"], "weight_decay": 0.1}, {"adapts": (False, False), "decay": 0.1}),
        ({"exclude": ["other"]}, {}),
    ],
)
def test_steps_are_those_of_the_paper(given, expected):
    for weight, other in zip(updated(LARS(0.5, **given)), reference(0.5, **expected), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)


def test_sparse_gradients_update_like_dense_gradients():
    tables = []
    dense = tf.constant([[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    for gradient in (tf.IndexedSlices(tf.ones([2, 2]), [0, 0], [3, 2]), dense):
        table = tf.Variable(tf.ones([3, 2]))
        LARS(0.5, trust_coefficient=0.1).apply([gradient], [table])
        tables.append(table.numpy())
    np.testing.assert_allclose(*tables, rtol=1e-6)
    assert (tables[0][1:] == 1).all()


def test_loaded_optimizer_equals_saved_one(tmp_path):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(LARS(0.2, weight_decay=0.3, exclude=["x"], clipnorm=1.0), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config() == model.optimizer.get_config()
    assert loaded.get_config()["weight_decay"] == 0.3
    for variable, other in zip(loaded.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


def test_linear_regression_converges():
    """Under a strategy, and with averaged gradients."""
    tfdist.init()
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    losses = []
    for strategy, wrap in (
        (tfdist.AllReduceStrategy(), lambda optimizer: optimizer),
        (tf.distribute.get_strategy(), tfdist.DistributedOptimizer),
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(wrap(LARS(1.0, trust_coefficient=0.05)), "mse")
        losses.append(model.fit(x, y, batch_size=64, epochs=20, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] < 0.05 * losses[0][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "less than 1; got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay of at least 0"),
        ({"trust_coefficient": 0.0}, "a positive trust_coefficient"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        LARS(**arguments)
