"""A small `fit`."""

import keras
import numpy as np

import tfdist


def fit(*callbacks, strategy=None, epochs=2):
    x = np.ones((8, 3), np.float32)
    with (strategy or tfdist.AllReduceStrategy()).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model
