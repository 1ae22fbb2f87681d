"""In a process alone; `tests/multiprocess/test_gossip.py` has several."""

import keras
import numpy as np

import tfdist
from tests.callbacks.fitting import fit


def test_nothing_is_stale_where_steps_are_taken_together(caplog):
    caplog.set_level("INFO", "tfdist")
    report = tfdist.callbacks.StalenessReport()
    fit(report)
    assert (report.history, report.counts) == ({}, [])
    said = [record for record in caplog.records if "StalenessReport does nothing" in record.getMessage()]
    assert len(said) == 1


def test_staleness_between_two_readings_is_reported(monkeypatch, tmp_path):
    """Uses a strategy that mixes weights with those of other processes."""
    strategy = tfdist.GossipStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    used = iter([{0: 5}, {0: 5, 1: 2, 4: 2}, {0: 5, 1: 2, 4: 2}, {0: 7, 1: 2, 4: 2}])
    monkeypatch.setattr(type(strategy.extended), "staleness", lambda self, model: next(used))
    report = tfdist.callbacks.StalenessReport(log_dir=str(tmp_path))
    model.fit(np.ones((8, 3)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=[report])
    assert report.counts == [{1: 2, 4: 2}, {0: 2}]
    assert report.history == {"staleness": [2.5, 0.0], "most_staleness": [4.0, 0.0]}
    assert list(tmp_path.iterdir())


def test_single_gossip_process_reports_no_staleness(caplog):
    caplog.set_level("INFO", "tfdist")
    strategy = tfdist.GossipStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report = tfdist.callbacks.StalenessReport()
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[report])
    assert (report.history, report.counts) == ({}, [])
    assert "StalenessReport does nothing" in caplog.text
