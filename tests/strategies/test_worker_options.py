"""The strategy's arguments reach the workers."""

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.compression import Int8
from tfdist.compression.policy import as_policy
from tfdist.parameter_server import Asynchronous, BoundedStaleness, LocalSteps, SoftSync
from tfdist.strategies import parameter_server
from tfdist.strategies.worker_options import WorkerOptions

CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}


class Extended(parameter_server.OneDevice):
    """Keeps what it is given, and connects to nothing."""

    def __init__(self, strategy, member, timeouts, options):
        super().__init__(strategy, "CPU:0")
        self.options = options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"synchronization": Asynchronous(), "prefetch": 1}, {"clips": True, "prefetch": 1}),
        (
            {"synchronization": BoundedStaleness(2), "data": "shared"},
            {"shares_data": True, "workers_wait": True, "bound": 2},
        ),
        ({"synchronization": SoftSync(1), "sparse": "lazy"}, {"clips": False, "is_lazy": True}),
        ({"pushes": LocalSteps(3)}, {"pushes": LocalSteps(3)}),
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
    strategy = parameter_server.ParameterServerStrategy(compression=Int8())
    assert repr(strategy.extended.options.compression) == repr(as_policy(Int8()))
