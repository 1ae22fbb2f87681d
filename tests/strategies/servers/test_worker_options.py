"""The strategy's arguments reach the workers."""

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.compression import Int8
from tfdist.compression.policy import as_policy
from tfdist.parameter_server import Asynchronous, BoundedStaleness, Gradients, LocalSteps, PerHost, SoftSync
from tfdist.strategies.servers import parameter_server
from tfdist.strategies.servers.worker_options import WorkerOptions

CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2", "127.0.0.1:3"]}


class Extended(parameter_server.OneDevice):
    """Keeps what it is given, and connects to nothing."""

    def __init__(self, strategy, member, timeouts, options, device):
        super().__init__(strategy, device)
        self.options = options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"synchronization": Asynchronous(), "pushes": Gradients(prefetch=1)}, {"clips": True, "prefetch": 1}),
        (
            {"synchronization": BoundedStaleness(2), "data": "shared"},
            {"shares_data": True, "workers_wait": True, "bound": 2},
        ),
        ({"synchronization": SoftSync(1), "pushes": Gradients(sparse="lazy")}, {"clips": False, "is_lazy": True}),
        ({"pushes": LocalSteps(3)}, {"pushes": LocalSteps(3)}),
        (
            {"synchronization": BoundedStaleness(3), "servers": PerHost(BoundedStaleness(2))},
            {"hierarchy": PerHost(BoundedStaleness(2)), "workers_wait": True, "bound": 2},
        ),
        ({"servers": PerHost()}, {"hierarchy": PerHost(), "clips": False}),
    ],
)
def test_arguments_reach_the_workers(monkeypatch, arguments, expected):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr(parameter_server.job, "enter", lambda *arguments: SimpleNamespace())
    monkeypatch.setattr(parameter_server.agreement, "agree", lambda *arguments: None)
    monkeypatch.setattr(parameter_server, "ServerExtended", Extended)
    strategy = parameter_server.ParameterServerStrategy(**arguments)
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.extended.options == WorkerOptions(**{"clips": True, **expected})


def test_compression_is_a_policy(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr(parameter_server.job, "enter", lambda *arguments: SimpleNamespace())
    monkeypatch.setattr(parameter_server.agreement, "agree", lambda *arguments: None)
    monkeypatch.setattr(parameter_server, "ServerExtended", Extended)
    strategy = parameter_server.ParameterServerStrategy(pushes=Gradients(compression=Int8()))
    assert repr(strategy.extended.options.compression) == repr(as_policy(Int8()))


@pytest.mark.parametrize(
    ("job", "index", "rank"), [("chief", 0, 0), ("worker", 1, 2), ("worker", 7, -1), ("evaluator", 0, -1)]
)
def test_rank_and_size(monkeypatch, job, index, rank):
    """As data are divided by them: of the workers that the cluster names."""
    cluster = {**CLUSTER, "worker": ["127.0.0.1:4", "127.0.0.1:5"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    monkeypatch.setattr(parameter_server.job, "enter", lambda *arguments: SimpleNamespace())
    monkeypatch.setattr(parameter_server.agreement, "agree", lambda *arguments: None)
    monkeypatch.setattr(parameter_server, "ServerExtended", Extended)
    strategy = parameter_server.ParameterServerStrategy()
    assert (strategy.rank, strategy.size) == (rank, 3)
    assert strategy.extended.options.observes is (job == "evaluator")
