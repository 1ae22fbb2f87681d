"""The report of a job, and its tasks; `test_run.py` has whole runs."""

import itertools
import json
import signal
import socket
import subprocess

import pytest

from tfdist.cli import job
from tfdist.cli.job import Job, Roles
from tfdist.cli.process import Process


def test_ports_are_different_and_free():
    ports = job._free_ports(20)
    assert len(set(ports)) == 20
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        assert max(ports) < connection.getsockname()[1], "none that the kernel gives to a connection"
    for port in ports[:3]:
        socket.create_server(("127.0.0.1", port)).close()


def test_ports_are_different_when_candidates_repeat(monkeypatch):
    monkeypatch.setattr(job, "_candidates", lambda: itertools.chain([1 << 14] * 3, itertools.repeat(0)))
    assert len(set(job._free_ports(5))) == 5


def ended(command, name="rank 1", **known):
    popen = subprocess.Popen(["sh", "-c", command])
    popen.wait(30)
    return Process(name, popen, -1, **known)


def ended_job(workers, *processes):
    """A job whose processes have ended."""
    made = Job(["true"], Roles(workers), False, False)
    made._processes = list(processes)
    return made


@pytest.mark.parametrize(("restarted", "is_ended"), [(1, True), (0, False)])
def test_a_restarted_process_that_finds_nobody_is_ended_unless_it_is_the_chief(restarted, is_ended):
    """A chief goes on from its backup, and writes the files."""
    processes = [ended("exit 0", f"rank {rank}", has_entered=rank != restarted) for rank in range(2)]
    processes[restarted].is_restart = True
    assert ended_job(2, *processes)._has_nobody_to_train_with([processes[restarted]]) is is_ended


@pytest.mark.parametrize(
    ("command", "how", "code"),
    [
        ("exit 7", "exited with code 7", 7),
        ("kill -TERM $$", "was killed by SIGTERM", 128 + 15),
        ("kill -36 $$", "was killed by signal 36", 128 + 36),
    ],
)
def test_exit_code_is_that_of_the_blamed_process(capfd, command, how, code):
    process = ended(command)
    assert ended_job(3, process, process, process)._report([process]) == code
    said = f"tfdist run: rank 1 (process {process.popen.pid}) {how}; the other processes were ended.\n"
    assert capfd.readouterr().err == said


def test_report_of_a_single_process_mentions_no_others(capfd):
    ended_job(1, ended("exit 1", "rank 0"))._report([ended("exit 1", "rank 0")])
    assert capfd.readouterr().err.endswith("exited with code 1.\n")


def test_a_restarted_process_that_could_not_enter_the_job_is_not_said_to_hang(capfd):
    again = ended("kill -KILL $$", is_restart=True, ended_by_us=True)
    ended_job(2, again, again)._report([again])
    assert "was started again, and could not enter the job again: only with QuorumStrategy" in capfd.readouterr().err


def test_hung_process_is_named_with_its_victims_code(capfd):
    """The code of a process that was killed by the launcher says nothing."""
    still, victim = ended("kill -KILL $$", ended_by_us=True), ended("exit 5", name="rank 0", is_victim=True)
    assert ended_job(2, still, victim)._report([still, victim]) == 5
    assert "hung, or failed and did not end by itself" in capfd.readouterr().err
    assert ended_job(2, still, victim)._report([still]) == 1


@pytest.mark.parametrize(
    ("command", "known"),
    [("exit 130", {}), ("kill -INT $$", {}), ("kill -TERM $$", {"ended_by_us": True}), ("exit 1", {"is_victim": True})],
)
def test_interrupted_process_is_not_reported_as_failed(capfd, command, known):
    """Also one that takes longer than the grace, on a machine that is busy, or that ends as another has ended."""
    asked = ended(command, "rank 0", **known)
    job = ended_job(1, asked)
    job._asked_to_end_by = signal.SIGINT
    assert job._report([asked]) == 130
    assert capfd.readouterr().err == "tfdist run: ended by SIGINT (Ctrl-C), as were the processes.\n"


def test_failure_before_an_interrupt_is_reported(capfd):
    failed = ended("exit 3", "rank 0")
    job = ended_job(1, failed)
    job._asked_to_end_by = signal.SIGINT
    assert job._report([failed]) == 3
    assert "exited with code 3" in capfd.readouterr().err


def test_other_roles_have_places_in_the_cluster():
    tasks = Roles(workers=2, servers=1, evaluators=1).tasks()
    assert [(task.job, task.index) for task in tasks] == [("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    config = json.loads(job._tf_config(tasks[2], tasks))
    assert config["task"] == {"type": "ps", "index": 0}
    assert config["cluster"] == {
        "worker": [tasks[0].address, tasks[1].address],
        "ps": [tasks[2].address],
        "evaluator": [tasks[3].address],
    }
