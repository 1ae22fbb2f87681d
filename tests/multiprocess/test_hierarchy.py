"""Servers of hosts between workers and roots, with real processes; the hosts are addresses of this machine."""

import json
import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

HOSTS = {
    "chief": ["127.0.0.1"],
    "worker": ["127.0.0.1", "127.0.0.2"],
    "ps": ["127.0.0.1", "127.0.0.1", "127.0.0.2"],
}
"""The first ps is the root, the others are the servers of their hosts."""


def configs():
    ports = iter(harness.free_ports(sum(map(len, HOSTS.values()))))
    cluster = {job: [f"{host}:{next(ports)}" for host in hosts] for job, hosts in HOSTS.items()}
    tasks = [(job, index) for job, hosts in HOSTS.items() for index in range(len(hosts))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in tasks
    ]


def test_synchronous_steps_on_both_levels_equal_one_process():
    program = [str(harness.PROGRAMS / "hierarchy_equal.py")]
    with harness.started(program, 6, per_rank=configs()) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * 6, processes.outputs()
    chief, *others = harness.results(ended[:3])
    for name, result in chief.items():
        assert result["error"] < 1e-5, (name, result)
        assert result["iterations"] == 18, name
        assert all(other[name]["sum"] == result["sum"] for other in others), f"{name}: the workers' weights differ"
    harness.assert_nothing_left()


def test_a_server_of_a_host_is_killed_and_comes_back_and_every_update_counts_once(tmp_path):
    given, died = configs(), 4
    program = [str(harness.PROGRAMS / "hierarchy_faults.py"), str(tmp_path)]
    with harness.started(program, 6, per_rank=given) as processes:
        for worker in range(3):
            processes.await_output(worker, "HOLDS")
        processes.signal(died, signal.SIGKILL)
        with harness.started(program, 1, per_rank=given[died : died + 1]) as again:
            (tmp_path / "back").touch()
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, 0, 0, -signal.SIGKILL, 0, 0], outputs
    results = harness.results(ended[:3])
    assert max(result["iterations"] for result in results) == sum(result["steps"] for result in results), outputs
    assert max(result["accuracy"] for result in results) > 0.8, outputs
    harness.assert_nothing_left()
