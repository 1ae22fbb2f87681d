"""Imbalanced classes as in keras.io's fraud example: class weights, then sample weights, weighted metrics."""

import keras
import numpy as np
from common import digits, strategy, weights
from keras import layers, metrics

scope = strategy()
images, labels = digits(103)
flat, rare = images.reshape(-1, 64), (labels == 3).astype("float64")[:, None]

with scope.scope():
    model = keras.Sequential([layers.Input((64,)), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")])
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "binary_crossentropy",
        metrics=[metrics.FalsePositives(name="fp"), metrics.Precision(name="precision"), metrics.Recall(name="recall")],
        weighted_metrics=["accuracy", metrics.AUC(name="auc", curve="PR")],
    )

by_class = model.fit(
    flat, rare, batch_size=32, epochs=2, shuffle=False, verbose=0, class_weight={0: 1 / 92.0, 1: 1 / 11.0}
)
by_sample = model.fit(
    flat, rare, batch_size=32, epochs=2, shuffle=False, verbose=0, sample_weight=np.where(rare, 5.0, 0.2)[:, 0]
)
results = {"weights": weights(model), "by_class": by_class.history, "by_sample": by_sample.history}
