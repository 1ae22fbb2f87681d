"""Callbacks in a process alone; `tests/multiprocess/test_observing.py` has them on several."""

import json

import keras
import numpy as np
import pytest

import tfdist


def fit(*callbacks, strategy=None, epochs=2):
    x = np.ones((8, 3), np.float32)
    with (strategy or tfdist.AllReduceStrategy()).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


def test_a_process_alone_sends_nothing():
    reports = tfdist.callbacks.Communication()
    fit(reports)
    assert reports.history["mib_sent"] == [0.0, 0.0]
    assert reports.history["slowest_rank"] == [-1.0, -1.0], "there is nobody to wait for it"
    assert "compression_ratio" not in reports.history


def test_a_report_of_a_process_alone(caplog):
    caplog.set_level("INFO", "tfdist")
    fit(tfdist.callbacks.Communication(), epochs=1)
    (report,) = [record.getMessage() for record in caplog.records if "epoch 1" in record.getMessage()]
    assert report.startswith("tfdist: epoch 1: each process sent 0.0 MiB, ")
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


def test_the_timeline_is_written_at_the_end(tmp_path):
    path = tmp_path / "timeline.json"
    model = fit(tfdist.callbacks.Timeline(path))
    written = json.loads(path.read_text())
    assert isinstance(written["traceEvents"] if isinstance(written, dict) else written, list)
    assert model.distribute_strategy.extended.group.engine.timeline is None, "it was not recorded before"


def test_a_timeline_that_cannot_be_written_is_an_error_before_training(tmp_path):
    with pytest.raises(OSError, match="cannot be written: directory missing or not writable"):
        fit(tfdist.callbacks.Timeline(tmp_path / "missing" / "timeline.json"))
