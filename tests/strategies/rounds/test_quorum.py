"""The strategy on one process; `tests/multiprocess/test_quorum.py` has it on several."""

import json

import keras
import pytest

import tfdist
from tests.strategies import outer_weights
from tfdist.compression import DeepGradientCompression
from tfdist.local_sgd import Averaging, Elastic, Outer


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sync_every": 0}, ValueError, "got sync_every=0"),
        (
            {"quorum": 0},
            ValueError,
            r"QuorumStrategy\(quorum=…\) must be a whole number of processes, at least 1; got 0",
        ),
        ({"quorum": True}, ValueError, "got True"),
        ({"grace": 0}, ValueError, r"QuorumStrategy\(grace=…\) must be a number of seconds above 0; got 0"),
        ({"grace": "5"}, ValueError, "got '5'"),
        ({"rule": keras.optimizers.SGD(0.7)}, TypeError, r"must be Averaging\(\) or Outer\(…\) of tfdist.local_sgd"),
        ({"rule": Elastic(0.9)}, TypeError, r"got Elastic\(0.9\)"),
        ({"rule": Averaging(mix=0.5)}, ValueError, "leave out mix=0.5"),
        ({"compression": 8}, TypeError, "8"),
        ({"compression": DeepGradientCompression(0.1)}, ValueError, "QuorumStrategy cannot compress with DeepGradient"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdist.QuorumStrategy(**arguments)


def cluster(task="worker", **jobs):
    jobs = jobs or {"worker": ["localhost:1", "localhost:2"]}
    return json.dumps({"cluster": jobs, "task": {"type": task, "index": 0}})


@pytest.mark.parametrize(
    ("config", "arguments", "error", "message"),
    [
        (cluster(), {"quorum": 3}, ValueError, r"quorum=3\) is too large: the cluster has only 2 training task\(s\)"),
        (cluster(worker=["a:1"], ps=["a:2"]), {}, tfdist.errors.ClusterSpecError, "leave out the job ps"),
        (cluster("ps", worker=["a:1"], ps=["a:2"]), {}, tfdist.errors.ClusterSpecError, "this process is ps 0"),
    ],
)
def test_bad_clusters(monkeypatch, config, arguments, error, message):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(error, match=message):
        tfdist.QuorumStrategy(**arguments)


def test_processes_of_an_mpi_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(
        tfdist.errors.ClusterSpecError, match="start each process with TF_CONFIG, or all of them by `tfdist run`"
    ):
        tfdist.QuorumStrategy()


def test_an_evaluator_is_alone(monkeypatch):
    """As in TensorFlow, and as under `tfdist.AllReduceStrategy`."""
    monkeypatch.setenv("TF_CONFIG", cluster("evaluator", worker=["a:1", "a:2"], evaluator=["a:3"]))
    strategy = tfdist.QuorumStrategy()
    assert (strategy.rank, strategy.size) == (0, 1)


def test_a_process_alone_moves_its_outer_weights():
    half = tfdist.QuorumStrategy(sync_every=2, rule=Outer(keras.optimizers.SGD(0.5)))
    assert (half.rank, half.size) == (0, 1)
    outer_weights.assert_moved(half)
    figures = half.communication()
    assert figures.pop("seconds") > 0
    assert figures == {"rounds": 3, "messages": 0, "bytes": 0}
