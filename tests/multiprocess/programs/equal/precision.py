"""Cases of lower precision."""

import keras
from world import X, Y, case, fitted, mlp, spread


@spread
def float32():
    return {"float32": fitted(mlp("sgd", layers=[keras.layers.Dense(8, dtype="float32")]))}


@case
def mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return {"low": fitted(mlp("sgd"))}
    finally:
        keras.config.set_dtype_policy("float64")


@case
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = mlp("sgd")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return {"low": fitted(model)}
    finally:
        keras.config.set_dtype_policy("float64")


@case
def mixed_float16_without_samples():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return {"low": fitted(mlp("sgd"), X[:33], Y[:33])}
    finally:
        keras.config.set_dtype_policy("float64")
