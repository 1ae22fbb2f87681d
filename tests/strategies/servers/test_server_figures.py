"""Figures of epochs on parameter servers, which are threads of this process."""

import logging

import numpy as np
import pytest

from tests.strategies.served import served
from tests.strategies.servers.trained import fit, model_in
from tfdist.callbacks import Communication
from tfdist.parameter_server.options.staleness import DropBeyond
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.strategies.servers import server_figures

BYTES = (4 * 8 + 8 + 8 * 2 + 2) * 4


def test_epoch_figures_count_updates_and_traffic(caplog, tmp_path):
    """Two epochs of four steps of one worker; what it is given at the start of an epoch is sent, too."""
    caplog.set_level(logging.INFO, "tfdist")
    with served(servers=2) as (strategy,):
        model, report = model_in(strategy, hidden=(8,)), Communication(str(tmp_path))
        fit(model, epochs=2, callbacks=[report])
    assert report.history["updates"] == [4, 4]
    assert report.history["staleness"] == [0, 0]
    assert report.history["dropped"] == [0, 0]
    np.testing.assert_allclose(report.history["mib_received"][1], 4 * BYTES / 2**20)
    np.testing.assert_allclose(report.history["mib_sent"][1], 5 * BYTES / 2**20)
    assert "tfdist: epoch 2: the servers made 4 updates" in caplog.text


def test_tensorboard_shows_a_histogram(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with served() as (strategy,):
        fit(model_in(strategy), epochs=2, callbacks=[Communication(str(tmp_path))])
    events = event_accumulator.EventAccumulator(str(tmp_path), {"tensors": 0})
    events.Reload()
    assert {"servers/updates", "servers/staleness of each"} <= set(events.Tags()["tensors"])
    (*_, last) = events.Tensors("servers/staleness of each")
    assert last.step == 1
    assert [last.tensor_proto.tensor_shape.dim[place].size for place in range(2)] == [1, 3]


def test_late_and_dropped_gradients_are_counted():
    """The second worker's gradients are of parameters that the first one has changed twice."""
    with served(workers=2, mode=Asynchronous(DropBeyond(1))) as (first, second):
        chief, worker = model_in(first), model_in(second)
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        before = server_figures.read(second.extended, worker)
        (link,) = first.extended.links(chief)
        (late,) = second.extended.links(worker)
        link.refresh()
        for _ in range(2):
            link.update(
                [np.zeros(variable.shape, "float32") for variable in chief.trainable_variables], link._variables
            )
        late.update([np.zeros(variable.shape, "float32") for variable in worker.trainable_variables], late._variables)
        late.update([np.zeros(variable.shape, "float32") for variable in worker.trainable_variables], late._variables)
        figures, staleness = server_figures.figures(before, server_figures.read(second.extended, worker))
        assert figures["updates"] == 3
        assert figures["dropped"] == 1
        assert staleness == {0: 3}
