"""A loop over `train_on_batch`, `test_on_batch` and `predict_on_batch`; each process brings its own rows of a batch."""

import keras
import numpy as np
from common import PLAIN, digits, strategy, weights

scope = strategy()
images, labels = digits(78)
flat = images.reshape(-1, 64)
rank, size = (0, 1) if PLAIN else (scope.rank, scope.size)

with scope.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])

logs = []
for _ in range(2):
    model.reset_metrics()
    for start in range(0, 78, 26):
        rows = np.arange(start, start + 26)[rank::size]  # 26 on three processes: 9, 9 and 8
        logs.append(model.train_on_batch(flat[rows], labels[rows], return_dict=True))
model.reset_metrics()
local_rows = np.arange(78)[rank::size]
tested = model.test_on_batch(flat[local_rows], labels[local_rows], return_dict=True)
outputs = model.predict_on_batch(flat[:4])
results = {"weights": weights(model), "logs": logs, "tested": tested, "outputs": outputs}
