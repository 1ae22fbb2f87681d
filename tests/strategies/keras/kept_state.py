"""A model whose layer keeps state of every dtype and aggregation."""

import keras

KEPT = ["sum", "mean", "only_first_replica", "none"]
WHOLE = ["int32", "bool"]
DTYPES = ["float32", "float16", "bfloat16", *WHOLE]


class Keeps(keras.layers.Layer):
    """Keeps state of every dtype and aggregation beside a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(), initializer="ones", name="kernel")
        self.kept = {
            (dtype, aggregation): self.add_weight(
                shape=(1,), dtype=dtype, initializer="zeros", trainable=False, aggregation=aggregation,
                name=f"{dtype}_{aggregation}",
            )
            for dtype in DTYPES
            for aggregation in KEPT
            if dtype not in WHOLE or aggregation != "mean"  # which TensorFlow has of floating point only
        }  # fmt: skip

    def call(self, x):
        return x * self.kernel


def model_with_state(strategy):
    with strategy.scope():
        layer = Keeps()
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        model.compile("sgd", "mse")
    return model, layer
