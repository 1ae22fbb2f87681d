"""Cases of lower precision."""

import keras
import numpy as np
from world import X, Y, batched, case, fitted, mlp, numbers, spread, strategy


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


@spread
def float8():
    """The ranges of float8 are of all replicas' values; a gradient's range is of each share's mean."""
    model = mlp("sgd")
    with strategy.scope():
        model.quantize("float8")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(batched(X, Y), epochs=2, verbose=0)
    ranges = {w.path: np.asarray(w).tolist() for w in model.weights if "inputs" in w.path or "kernel_" in w.path}
    assert len(ranges) == 8, ranges
    return {"low": [ranges, history.history["loss"]], "ranks_only": numbers(model)}
