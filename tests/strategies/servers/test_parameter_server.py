"""The strategy in a process alone; `tests/multiprocess/test_parameter_server.py` has jobs with servers."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import ClusterSpecError
from tfdist.parameter_server import BoundedStaleness, Gradients, LocalSteps, PerHost
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.strategies import current_strategy
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers import parameter_server
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def trained(strategy=None):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")

    def model():
        made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        made.compile("adam", "mse", run_eagerly=strategy is None)
        return made

    if strategy is None:
        made = model()
    else:
        with strategy.scope():
            made = model()
    history = made.fit(x, x[:, :1], epochs=3, batch_size=16, shuffle=False, verbose=0)
    return made.get_weights(), history.history["loss"]


def test_without_servers_a_process_trains_as_usual():
    weights, losses = trained()
    strategy_weights, strategy_losses = trained(ParameterServerStrategy())
    np.testing.assert_allclose(strategy_losses, losses, rtol=1e-5)
    for weight, other in zip(strategy_weights, weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_cluster_coordinator_raises_with_hint_at_fit():
    with pytest.raises(TypeError, match=r"needs no coordinator: train by model.fit, or call strategy.run"):
        tf.distribute.coordinator.ClusterCoordinator(ParameterServerStrategy())


def test_without_servers_no_seam_is_at_work():
    strategy = ParameterServerStrategy()
    assert (strategy.rank, strategy.size) == (0, 1)
    assert current_strategy.of_strategy(strategy, UpdatesOnServers) is None
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}


def test_workers_without_servers_raise(monkeypatch):
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    with pytest.raises(ClusterSpecError, match='has 2 workers and no parameter server: add a job "ps"'):
        ParameterServerStrategy()


def test_datasets_are_read_without_a_tuner():
    dataset = ParameterServerStrategy().experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.options().autotune.enabled is False


def test_invalid_data_option_raises():
    with pytest.raises(ValueError, match='data must be "own" or "shared"; got'):
        ParameterServerStrategy(data="none")


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"data='shared' does not go with pushes=LocalSteps\(steps=2\): the batches"):
        ParameterServerStrategy(data="shared", pushes=LocalSteps(2))


@pytest.mark.parametrize("name", parameter_server._ARGUMENTS)
def test_removed_arguments_raise_with_hint(name):
    with pytest.raises(TypeError, match=rf"ParameterServerStrategy\(\) has no argument {name}=; its equivalent is "):
        ParameterServerStrategy(**{name: None})


def test_per_host_without_host_servers_raises(monkeypatch):
    cluster = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    with pytest.raises(ClusterSpecError, match=r"besides 1 root server\(s\); the cluster has 1 task\(s\)"):
        ParameterServerStrategy(servers=PerHost())


def test_a_process_alone_needs_no_servers_of_hosts():
    assert current_strategy.of_strategy(ParameterServerStrategy(servers=PerHost()), UpdatesOnServers) is None


class Extended(parameter_server.OneDevice):
    """Keeps what it is given, and connects to nothing."""

    def __init__(self, strategy, member, timeouts, arguments, device, observes):
        super().__init__(strategy, device)
        self.arguments = arguments
        self.observes = observes


@pytest.fixture
def strategy_of(monkeypatch):
    """Makes a strategy in a task of a cluster with servers, which connects to nothing."""
    cluster = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:4", "127.0.0.1:5"]}
    monkeypatch.setattr(parameter_server.job, "enter", lambda *arguments: SimpleNamespace())
    monkeypatch.setattr(parameter_server.agreement, "agree", lambda *arguments: None)
    monkeypatch.setattr(parameter_server, "ServerExtended", Extended)

    def made(job="chief", index=0, **arguments):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
        return ParameterServerStrategy(**arguments)

    return made


def test_arguments_reach_the_workers(strategy_of):
    given = {"synchronization": BoundedStaleness(2), "pushes": Gradients(prefetch=1), "data": "shared"}
    assert strategy_of(**given).extended.arguments == Arguments(**given)


@pytest.mark.parametrize(
    ("job", "index", "rank"), [("chief", 0, 0), ("worker", 1, 2), ("worker", 7, -1), ("evaluator", 0, -1)]
)
def test_rank_and_size_are_among_the_workers_that_the_cluster_names(strategy_of, job, index, rank):
    strategy = strategy_of(job, index)
    assert (strategy.rank, strategy.size) == (rank, 3)
    assert strategy.extended.observes is (job == "evaluator")
