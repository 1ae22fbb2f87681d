"""Several outputs with a loss, a weight and metrics each, by name; sample weights by output."""

import keras
import numpy as np
from common import Logs, digits, strategy, weights
from keras import layers

scope = strategy()
images, labels = digits(50)
targets = {"digit": labels, "parity": (labels % 2).astype("float64")[:, None], "ink": images.mean(axis=(1, 2))}
importance = {"digit": np.linspace(0.5, 1.5, 50), "parity": np.ones(50), "ink": np.linspace(2, 0, 50)}

with scope.scope():
    inputs = keras.Input((8, 8, 1), name="image")
    hidden = layers.Dense(8, activation="tanh")(layers.Flatten()(inputs))
    outputs = {
        "digit": layers.Dense(10, name="digit")(hidden),
        "parity": layers.Dense(1, activation="sigmoid", name="parity")(hidden),
        "ink": layers.Dense(1, name="ink")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        "adam",
        loss={
            "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "parity": "binary_crossentropy",
            "ink": keras.losses.Huber(),
        },
        loss_weights={"digit": 1.0, "parity": 0.3, "ink": 5.0},
        metrics={"digit": "accuracy", "parity": ["accuracy", keras.metrics.AUC(name="auc")], "ink": "mae"},
    )

logs = Logs()
history = model.fit(
    images,
    targets,
    batch_size=16,
    epochs=2,
    shuffle=False,
    verbose=0,
    validation_data=(images, targets),
    callbacks=[logs],
)
weighed = model.fit(images, targets, sample_weight=importance, batch_size=16, shuffle=False, verbose=0)
results = {
    "weights": weights(model),
    "history": history.history,
    "weighed": weighed.history,
    "logs": logs.seen,
    "outputs": model.predict(images, batch_size=16, verbose=0),
}
