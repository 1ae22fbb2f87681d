"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import keras

import tfdist
from tests.callbacks.fitting import fit


class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


def test_logs_of_a_process_alone_are_its_own():
    seen, later = Seen(), Seen()
    model = fit(seen, tfdist.callbacks.MetricAverage(), later)
    assert seen.logs == later.logs
    assert seen.logs["loss"] == model.history.history["loss"][-1]
