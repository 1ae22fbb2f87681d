"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import keras

import tfdist
from tests.callbacks.fitting import fit
from tests.engine.ranks import ranks  # noqa: F401  (a fixture)
from tfdist.callbacks import metric_average


class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


def test_logs_of_a_process_alone_are_its_own():
    seen, later = Seen(), Seen()
    model = fit(seen, tfdist.callbacks.MetricAverage(), later)
    assert seen.logs == later.logs
    assert seen.logs["loss"] == model.history.history["loss"][-1]


def test_the_order_of_logs_does_not_matter(ranks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(metric_average, "has_others", lambda callback: True)
    monkeypatch.setattr(metric_average, "processes_of", lambda group: group)
    monkeypatch.setattr(metric_average.current_strategy, "of_model", lambda model, ability: None)

    def work(group):
        callback = tfdist.callbacks.MetricAverage()
        callback.set_model(group)
        logs = {"loss": 1.0, "accuracy": 0.5} if group.rank else {"accuracy": 0.25, "loss": 2.0}
        callback.on_epoch_end(0, logs)
        return logs

    assert ranks(2)(work) == [{"loss": 1.5, "accuracy": 0.375}] * 2
