"""What an outer optimizer makes of a process that trains alone, under any strategy that has one."""

import keras
import numpy as np
import pytest

import tfdist


def assert_moved(half):
    """Checks that ``half`` keeps half of each round's change, as its outer optimizer has a learning rate of 0.5."""
    x, y = np.ones([8, 1], "float32"), np.zeros([8, 1], "float32")

    def trained(strategy, steps):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(keras.optimizers.SGD(0.125), "mse")
        model.set_weights([np.ones([1, 1], "float32")])
        model.fit(x[: 2 * steps], y[: 2 * steps], batch_size=2, verbose=0)
        return model.get_weights()[0].item()

    whole = trained(tfdist.AllReduceStrategy(), 2)
    assert trained(half, 2) == pytest.approx(1 + (whole - 1) / 2)
    assert trained(half, 4) == pytest.approx((1 + (whole - 1) / 2) ** 2)
