"""A job on two hosts that only a network joins, and what becomes of it when that is cut."""

import json

import pytest

from tests.multiprocess import harness, namespaces
from tests.sweeps import sweep

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not namespaces.AVAILABLE, reason="needs root and iproute2 to make network namespaces"),
]


def on_two_hosts(command, names, settings):
    cluster = {"worker": ["10.77.0.1:2222", "10.77.0.2:2222"]}
    per_rank = [
        {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
            "UCX_NET_DEVICES": name,
        }
        for rank, name in enumerate(names)
    ]
    prefixes = [["ip", "netns", "exec", name] for name in names]
    return harness.started(command, 2, {**namespaces.SETTINGS, **settings}, per_rank, prefixes=prefixes)


@pytest.mark.parametrize("algorithm", ["ring", sweep("tensorflow")])
def test_cut_link_ends_ranks_on_both_hosts(algorithm):
    settings = {"TEST_DO": "say", "TEST_STEP": "20", "TEST_EPOCHS": "1000", "TFDIST_HEARTBEAT_TIMEOUT": "3"}
    settings["TEST_ALGORITHM"] = algorithm
    with namespaces.hosts() as names:
        with on_two_hosts([str(harness.PROGRAMS / "train.py")], names, settings) as processes:
            for rank in range(2):
                processes.await_output(rank, "READY")
            namespaces.ip("-n", names[1], "link", "set", names[1], "down")
            ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        assert "ERROR PeerLostError rank 1, worker 1 (10.77.0.2:2222)" in ended[0].output
        assert "gave no sign of life for" in ended[0].output
        assert "the rendezvous server at 10.77.0.1:2222" in ended[1].output
        assert "gave no sign of life for" in ended[1].output


def test_local_rank_is_zero_on_each_host():
    with namespaces.hosts() as names:
        with on_two_hosts([str(harness.PROGRAMS / "join.py")], names, {"TFDIST_SECRET": "x"}) as processes:
            ended = processes.wait()
        assert [end.code for end in ended] == [0, 0], processes.outputs()
        assert "SUM 0 2 0 3.0" in ended[0].output
        assert "SUM 1 2 0 3.0" in ended[1].output, "each is alone on its host"
