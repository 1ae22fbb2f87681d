"""``reduction=`` of every kind, with and without sample weights; 33 samples in batches of 16 leave shares unequal."""

import keras
import numpy as np
from common import digits, strategy, weights
from keras import layers, losses

scope = strategy()
images, labels = digits(33)
flat, target = images.reshape(-1, 64), keras.utils.to_categorical(labels, 10)
importance = np.linspace(0, 3, 33)


def train(reduction, sample_weight=None):
    keras.utils.set_random_seed(14)
    with scope.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.01), losses.MeanSquaredError(reduction=reduction))
    history = model.fit(
        flat, target, sample_weight=sample_weight, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    return {"weights": weights(model), "history": history}


results = {
    "sum": train("sum", importance),
    "none": train("none"),
    "mean_with_sample_weight": train("mean_with_sample_weight", importance),
}
