"""How jobs start, and how they do not: real processes, without TensorFlow where it does not matter."""

import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.multiprocess import harness

JOIN = [str(harness.PROGRAMS / "join.py")]

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    harness.assert_nothing_left()


WAITING = {}


def waiting(job):
    """Declares a job that mostly waits; `awaited` runs it, and the test of its name says how it has to end."""
    WAITING[job.__name__] = job
    return job


@pytest.fixture(scope="module")
def awaited():
    """How each job that mostly waits ended, as `joining` returns it; they run at the same time."""
    with ThreadPoolExecutor(len(WAITING)) as threads:
        futures = {name: threads.submit(job) for name, job in WAITING.items()}
    return lambda name: futures[name].result()


def joining(configs, settings=None, clustered=True):
    with harness.started(JOIN, len(configs), settings, configs, clustered) as processes:
        return processes.wait(), processes.outputs()


def sums(ended, size):
    for rank, end in enumerate(ended):
        assert f"SUM {rank} {size} {rank} {sum(range(1, size + 1)):.1f}" in end.output, end.output


@pytest.mark.parametrize("size", [2, 5])
def test_tf_config(size):
    sums(harness.run(JOIN, size), size)


def test_variables_of_a_launcher_around_the_job_are_not_its_own():
    """`mpiexec -n 1` sets them, and its script may start a job of two."""
    sums(harness.run(JOIN, 2, settings={"PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "1"}), 2)


def test_one_process_alone():
    (end,) = harness.run(JOIN, 1)
    assert "SUM 0 1 0 1.0" in end.output


def test_evaluator_is_not_a_rank_of_the_job():
    ports = harness.free_ports(4)
    cluster = {
        "chief": [f"127.0.0.1:{ports[0]}"],
        "worker": [f"127.0.0.1:{port}" for port in ports[1:3]],
        "evaluator": [f"127.0.0.1:{ports[3]}"],
    }
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    configs = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in tasks
    ]
    with harness.started(JOIN, 4, per_rank=configs) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * 4, processes.outputs()
        sums(ended[:3], 3)
        assert "SUM 0 1 0 1.0" in ended[3].output


@pytest.mark.skipif(not harness.MPIEXEC.exists(), reason="needs MPICH's mpiexec")
def test_mpiexec(tmp_path):
    ended = harness.mpiexec(3, *JOIN, TEST_FOLDER=str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = sorted(path.read_text() for path in tmp_path.iterdir())
    assert lines == ["SUM 0 3 0 6.0", "SUM 1 3 1 6.0", "SUM 2 3 2 6.0"]


@waiting
def srun():
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_LOCALID": "0",
    }
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return joining(ranks, step, clustered=False)


def test_srun_without_a_process_manager(awaited):
    """What srun sets, and nothing else: tfdist makes the cluster of it by itself."""
    ended, text = awaited("srun")
    assert [end.code for end in ended] == [0, 0], text
    sums(ended, 2)


def test_mpi_listens_on_no_outside_interface():
    with harness.started([*JOIN, "wait"], 2) as processes:
        for rank in range(2):
            processes.await_output(rank, "SUM")
        sockets = {inode for popen in processes.popens for inode in _sockets(popen.pid)}
        listening = [address for address, inode in _listening() if inode in sockets]
        outside = [address for address in listening if not address.startswith("0100007F")]
        assert not outside, outside


def _sockets(pid):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _listening():
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    yield fields[1], fields[9]


BAD = {
    "not JSON": ("{cluster", "TF_CONFIG is not JSON"),
    "no object": ("[1]", "TF_CONFIG must be a JSON object"),
    "no object of jobs": ('{"cluster": ["a:1"], "task": {}}', "TF_CONFIG must hold an object under 'cluster'"),
    "no task": ('{"cluster": {"worker": ["a:1"]}}', "TF_CONFIG lacks 'task'"),
    "index out of range": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
        "this process is worker 2, but the cluster has 2 task(s)",
    ),
    "duplicate address": (
        '{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}',
        "the address a:1 is given to both worker 0 and worker 1",
    ),
    "unknown job": (
        '{"cluster": {"worker": ["a:1"], "server": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
        "unknown job 'server'",
    ),
    "a parameter server": (
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}',
        "this process is ps 0 (b:1), a parameter server. Start the script without this task.",
    ),
    "an additional worker": (
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 4}}',
        "this process is worker 4, which the cluster does not list.",
    ),
    "no port": ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}', "host:port"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tf_config(name):
    config, message = BAD[name]
    with harness.started(JOIN, 1, {"TF_CONFIG": config}) as processes:
        (end,) = processes.wait()
        assert end.code == 1, end.output
        assert "ClusterSpecError" in end.output
        assert message in end.output


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        with harness.started(JOIN, 1, {"TF_CONFIG": config}) as processes:
            (end,) = processes.wait()
    assert end.code == 1
    assert f"the chief cannot listen at 127.0.0.1:{port}: another process uses it" in end.output


@waiting
def absent_tasks():
    ports = harness.free_ports(4)
    configs = [{"TF_CONFIG": harness.tf_config(rank, ports)} for rank in range(2)]
    return ports, *joining(configs, {"TFDIST_START_TIMEOUT": "5"})


def test_tasks_that_never_come_are_listed(awaited):
    ports, ended, text = awaited("absent_tasks")
    for end in ended:
        assert end.code == 1, text
        assert "2 of 4 tasks came within 5 s" in end.output, text
        assert f"worker 2 (127.0.0.1:{ports[2]}), worker 3 (127.0.0.1:{ports[3]})" in end.output


@waiting
def absent_chief():
    ports = harness.free_ports(2)
    return joining([{"TF_CONFIG": harness.tf_config(1, ports)}], {"TFDIST_START_TIMEOUT": "2"})


def test_chief_that_never_comes(awaited):
    (end,), _ = awaited("absent_chief")
    assert end.code == 1
    assert "Missing: the chief" in end.output
    assert end.output.splitlines()[-1].startswith("tfdist.errors.RendezvousError"), end.output


@waiting
def twins():
    ports = harness.free_ports(3)
    first = {"TF_CONFIG": harness.tf_config(0, ports)}
    twin = {"TF_CONFIG": harness.tf_config(1, ports)}
    return joining([first, twin, twin], {"TFDIST_START_TIMEOUT": "6"})


def test_two_tasks_that_claim_one_index(awaited):
    ended, text = awaited("twins")
    assert "two tasks claim one index: worker 1" in "".join(end.output for end in ended[1:]), text
    assert "2 of 3 tasks came" in ended[0].output, text


@pytest.mark.parametrize("secret", ["wrong", None])
def test_task_without_the_secret_is_refused_and_the_job_goes_on(secret):
    ports = harness.free_ports(2)
    right = {"TFDIST_SECRET": "right"}
    configs = [
        {"TF_CONFIG": harness.tf_config(0, ports), **right},
        {"TF_CONFIG": harness.tf_config(1, ports), **({"TFDIST_SECRET": secret} if secret else {})},
    ]
    with harness.started(JOIN, 2, {"TFDIST_START_TIMEOUT": "60"}, configs) as processes:
        processes.await_output(1, "refused this task: wrong or missing secret")
        with harness.started(JOIN, 1, per_rank=[{**configs[1], **right}]) as late:
            (end,) = late.wait()
            assert "SUM 1 2 1 3.0" in end.output, late.outputs() + processes.outputs()
        ended = processes.wait()
        assert [end.code for end in ended] == [0, 1], processes.outputs()
        assert "right" not in processes.outputs().replace("is right", "")
        assert ended[1].output.splitlines()[-1].startswith("tfdist.errors.RendezvousError"), ended[1].output


def test_missing_secret_is_warned_of():
    ended = harness.run(JOIN, 2)
    assert "no job secret is set: every process on this machine (127.0.0.1" in ended[0].output
    assert "no job secret" not in ended[1].output


def test_secret_from_a_file(tmp_path):
    (tmp_path / "secret").write_text("from a file\n")
    (tmp_path / "secret").chmod(0o600)
    ended = harness.run(JOIN, 2, settings={"TFDIST_SECRET_FILE": str(tmp_path / "secret")})
    sums(ended, 2)
    assert "no job secret" not in ended[0].output
    assert "the job's secret has 11 characters" in ended[0].output


@waiting
def two_specs():
    ports = harness.free_ports(3)
    configs = [
        {"TF_CONFIG": harness.tf_config(0, ports[:2])},
        {"TF_CONFIG": harness.tf_config(1, [ports[0], ports[2]])},
    ]
    return joining(configs, {"TFDIST_START_TIMEOUT": "5"})


def test_another_cluster_spec(awaited):
    ended, text = awaited("two_specs")
    assert [end.code for end in ended] == [1, 1], text
    assert "another cluster spec" in ended[1].output, text
    assert "Refused: worker 1" in ended[0].output, text


@waiting
def two_versions():
    ports = harness.free_ports(2)
    configs = [{"TF_CONFIG": harness.tf_config(rank, ports)} for rank in range(2)]
    program = (
        "import runpy, sys, tfdist._version; tfdist._version.__version__ = '9.9';"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    )
    with (
        harness.started(JOIN, 1, {"TFDIST_START_TIMEOUT": "6"}, configs[:1]) as chief,
        harness.started(["-c", program, *JOIN], 1, None, configs[1:]) as other,
    ):
        return [*other.wait(), *chief.wait()], other.outputs() + chief.outputs()


def test_another_version(awaited):
    (other, chief), text = awaited("two_versions")
    assert other.code == 1, text
    assert "another tfdist version: the chief runs" in other.output, text
    assert "this task 9.9" in other.output, text
    assert "Refused: worker 1" in chief.output, text


def test_random_bytes_at_the_rendezvous_change_nothing():
    ports = harness.free_ports(2)
    configs = [{"TF_CONFIG": harness.tf_config(rank, ports)} for rank in range(2)]
    with harness.started(JOIN, 1, None, configs[:1]) as chief:
        chief.await_output(0, "no job secret")
        for noise in (
            b"",
            os.urandom(100),
            b"\n" * 1000,
            os.urandom(1 << 20),
            b'{"claims": 3}\n',
            b'{"claims": {}}\n',
            b"[]\n",
            b"[" * 8000 + b"\n",
        ):
            _send("127.0.0.1", ports[0], noise)
        with harness.started(JOIN, 1, None, configs[1:]) as other:
            (end,) = other.wait()
            assert end.code == 0, end.output
        (end,) = chief.wait()
        assert end.code == 0, end.output


def _send(host, port, noise, tries=100):
    for _ in range(tries):
        try:
            with socket.create_connection((host, port), timeout=100) as connection:
                try:
                    connection.sendall(noise)
                except OSError:
                    pass
            return
        except ConnectionRefusedError:
            continue
    raise AssertionError("the rendezvous does not listen")


def test_silent_connections_do_not_block_the_job():
    """More of them than the server may have files open; none of them says a word."""
    ports = harness.free_ports(2)
    configs = [{"TF_CONFIG": harness.tf_config(rank, ports)} for rank in range(2)]
    few_files = ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh"]
    with harness.started(JOIN, 1, None, configs[:1], prefixes=[few_files]) as chief, contextlib.ExitStack() as silent:
        chief.await_output(0, "no job secret")
        _send("127.0.0.1", ports[0], b"")
        for _ in range(400):
            silent.enter_context(socket.create_connection(("127.0.0.1", ports[0]), timeout=100))
        with harness.started(JOIN, 1, None, configs[1:]) as other:
            (end,) = other.wait()
            assert end.code == 0, end.output
        (end,) = chief.wait()
        assert end.code == 0, end.output
        assert "Traceback" not in end.output


PICKLES = """
import runpy, sys
from tfdist.comm import mpi_library
def forbidden(*_, **__):
    raise AssertionError("a pickle")
mpi_library.load().pickle.__init__(forbidden, forbidden)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0])
"""


def test_nothing_is_pickled():
    """With or without a launcher; whoever sends a pickle has code run by who reads it."""
    sums(harness.run(["-c", PICKLES, *JOIN], 3), 3)
    if harness.MPIEXEC.exists():
        ended = harness.mpiexec(3, "-c", PICKLES, *JOIN)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("SUM") == 3


def test_other_service_at_address_of_chief_raises():
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [other.getsockname()[1], harness.free_ports(1)[0]]
        with harness.started(JOIN, 1, {"TF_CONFIG": harness.tf_config(1, ports)}) as processes:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            (end,) = processes.wait()
            connection.close()
    assert end.code == 1
    assert "is not a rendezvous server of tfdist" in end.output


def test_job_waits_for_replacement_of_dead_task():
    """Its scheduler may start it again; the job waits until the deadline."""
    ports = harness.free_ports(3)
    configs = [{"TF_CONFIG": harness.tf_config(rank, ports)} for rank in range(3)]
    with harness.started(JOIN, 2, {"TFDIST_START_TIMEOUT": "60"}, configs[:2]) as processes:
        _await_connections(ports[0], 2)
        processes.signal(1, signal.SIGKILL)
        with harness.started(JOIN, 2, None, configs[1:]) as others:
            for end in others.wait():
                assert end.code == 0, others.outputs() + processes.outputs()
        assert processes.wait()[0].code == 0


def _await_connections(port, count):
    """Until the rendezvous holds so many connections."""
    end = time.monotonic() + harness.DEADLINE
    address = f"0100007F:{port:04X}"
    while True:
        with open("/proc/net/tcp") as lines:
            fields = [line.split() for line in lines]
        if sum(local == address and state == "01" for _, local, _, state, *_ in fields) >= count:
            return
        assert time.monotonic() < end, "the tasks did not come"
        time.sleep(0.02)
