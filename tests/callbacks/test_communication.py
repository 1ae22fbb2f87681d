"""In a process alone; `tests/multiprocess/test_observing.py` has several."""

import keras
import numpy as np

import tfdist
from tests.callbacks.fitting import fit
from tfdist.callbacks import communication


def test_a_process_alone_sends_nothing():
    reports = tfdist.callbacks.Communication()
    fit(reports)
    assert reports.history["mib_sent"] == [0.0, 0.0]
    assert reports.history["slowest_rank"] == [-1.0, -1.0], "there is nobody to wait for it"
    assert "compression_ratio" not in reports.history


def test_waits_that_last_longer_than_collectives_hide_nothing(monkeypatch):
    readings = iter([np.zeros(4), np.array([1.0, 0.0, 0.5, 0.50001])])
    monkeypatch.setattr(communication, "_reading", lambda group: next(readings))
    reports = tfdist.callbacks.Communication()
    fit(reports, epochs=1)
    assert reports.history["share_hidden"] == [0.0]


def test_report_of_single_process_is_logged(caplog):
    caplog.set_level("INFO", "tfdist")
    fit(tfdist.callbacks.Communication(), epochs=1)
    (report,) = [record.getMessage() for record in caplog.records if "epoch 1" in record.getMessage()]
    assert report.startswith("tfdist: epoch 1: each process sent 0.0 MiB and communicated for ")
    assert report.endswith("no rank was much slower than the others.")


def test_tensorboard_gets_a_scalar_for_each_figure(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(tfdist.callbacks.Communication(log_dir=str(tmp_path)))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = {"mib_sent", "seconds_communicating", "share_hidden", "slowest_rank"}
    assert set(events.Tags()["tensors"]) == {f"communication/{name}" for name in names}
    assert [event.step for event in events.Tensors("communication/mib_sent")] == [0, 1]


def test_a_plain_model_is_reported_too():
    """Such as one that is trained with `tfdist.all_reduce` in its own step."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    reports = tfdist.callbacks.Communication()
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[reports])
    assert reports.history["mib_sent"] == [0.0]


def test_rounds_of_a_quorum_are_reported(caplog):
    caplog.set_level("INFO", logger="tfdist")
    strategy = tfdist.QuorumStrategy(sync_every=2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report = tfdist.callbacks.Communication()
    model.fit(np.ones((12, 2)), np.ones(12), batch_size=2, epochs=2, verbose=0, callbacks=[report])
    assert report.history["rounds"] == [3.0, 3.0]
    assert report.history["mib_sent"] == [0.0, 0.0]
    assert min(report.history["seconds_in_rounds"]) > 0
    assert "this process took part in 3 rounds" in caplog.text
