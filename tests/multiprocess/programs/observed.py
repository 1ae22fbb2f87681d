"""A training whose communication is reported per epoch, and recorded; see `tests/multiprocess/test_observing.py`."""

import json
import os
import time

import keras
import numpy as np

import tfdist

strategy = tfdist.AllReduceStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(1000, name="wide"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Slow(keras.callbacks.Callback):
    """Rank 1 computes for longer, in the second epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and strategy.rank == 1:
            time.sleep(0.25)  # so much that a busy machine does not outweigh it


folder = os.environ["TEST_FOLDER"]
report = tfdist.callbacks.Communication(log_dir=f"{folder}/logs")
recorder = tfdist.callbacks.Timeline(f"{folder}/timeline.json")
model.fit(
    np.zeros((320, 16)), np.zeros((320, 1)), batch_size=32, epochs=2, verbose=0, callbacks=[Slow(), report, recorder]
)
print("RESULT", json.dumps({"history": report.history, "parameters": model.count_params()}), flush=True)
