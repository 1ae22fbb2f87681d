"""Jobs whose ranks are in containers of their own, in the kernel's terms: namespaces, /dev/shm, users, system calls.

Each either sums correctly, over whatever way is left, or fails at the start with a message that says what to do.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.multiprocess import harness, namespaces
from tests.sweeps import sweep

SUMS = [str(harness.PROGRAMS / "sums.py")]


def _permitted():
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    trial = ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not _permitted(), reason="needs root and unshare to make namespaces"),
]

NOTHING: list[str] = []
PROCESSES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
IPC = ["unshare", "--ipc"]
USERS = ["unshare", "--user", "--map-root-user"]


def shm(options):
    """A /dev/shm of its own, with these mount options."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]


def shared_shm(folder):
    """The folder as /dev/shm."""
    return ["unshare", "--mount", "sh", "-c", f'mount --bind {folder} /dev/shm && exec "$@"', "sh"]


def user(number):
    """Another user, who may read Python's files wherever they lie."""
    capabilities = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", "--reuid", str(number), "--regid", str(number), "--clear-groups", *capabilities]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    harness.assert_nothing_left()


def outputs(prefixes, codes=(0, 0), settings=None):
    settings = {"TFDIST_SECRET": "x", "TFDIST_START_TIMEOUT": "30", **(settings or {})}
    with harness.started(SUMS, len(prefixes), settings, prefixes=prefixes) as processes:
        ended = processes.wait()
        assert tuple(end.code for end in ended) == tuple(codes), processes.outputs()
        return [end.output for end in ended]


ONE_MACHINE = "MPI shares no memory between rank 0 and rank 1, though they run on one machine: "

CONTAINERS = {
    "one for both": ([NOTHING, NOTHING], "RIGHT hosts 1 nodes 1", None),
    "IPC": ([IPC, IPC], "RIGHT hosts 1 nodes 1", None),
    "PID of each": ([PROCESSES, PROCESSES], "RIGHT hosts 2 nodes 2", "they have different PID namespaces"),
    "PID of one": ([NOTHING, PROCESSES], "RIGHT hosts 2 nodes 2", "they have different PID namespaces"),
    "PID and IPC": ([PROCESSES + IPC, PROCESSES + IPC], "RIGHT hosts 2 nodes 2", "different PID namespaces"),
    "/dev/shm of each": ([shm("size=64m")] * 2, "RIGHT hosts 1 nodes 2", "each has a /dev/shm of its own"),
    "/dev/shm of one": ([NOTHING, shm("size=64m")], "RIGHT hosts 1 nodes 2", "each has a /dev/shm of its own"),
    "small /dev/shm": ([shm("size=1m")] * 2, "RIGHT hosts 1 nodes 2", "each has a /dev/shm of its own"),
    "all of each": ([PROCESSES + IPC + shm("size=1m")] * 2, "RIGHT hosts 2 nodes 2", "each has a /dev/shm of its own"),
    "different users": ([user(12345), user(12346)], "RIGHT hosts 2 nodes 2", "they run as different users"),
    "user namespaces": ([USERS, USERS], "RIGHT", None),
}


MIXED = ["PID of one", "PID and IPC", "/dev/shm of one", "all of each"]
"""What others have of one rank, or one by one."""


@pytest.mark.parametrize("name", [sweep(name) if name in MIXED else name for name in CONTAINERS])
def test_sums_are_right(name):
    prefixes, result, reason = CONTAINERS[name]
    printed = outputs(prefixes)
    for output in printed:
        assert result in output
    if reason:
        assert printed[0].count(ONE_MACHINE) == 1
        assert reason in printed[0]
        assert ONE_MACHINE not in printed[1]


FORBIDDEN = {
    "process_vm_readv": ("hosts 1 nodes 2", "process_vm_readv: Operation not permitted"),
    "memfd_create": ("hosts 1 nodes 1", ""),
    "process_vm_readv memfd_create": ("hosts 2 nodes 2", "They communicate over TCP, which is slower"),
}


@pytest.mark.parametrize("calls", FORBIDDEN)
def test_sums_are_right_with_forbidden_system_calls(calls):
    result, reason = FORBIDDEN[calls]
    printed = outputs([NOTHING, NOTHING], settings={"TEST_FORBIDDEN": calls})
    assert f"RIGHT {result}" in printed[0]
    assert reason in printed[0]


@contextlib.contextmanager
def mounted(folder, options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("size", ["64m", "1m"])
def test_dev_shm_of_a_pod(size, tmp_path):
    """Both ranks share it, and it has room for MPI's defaults or only for less."""
    with mounted(str(tmp_path), f"size={size}") as folder:
        for output in outputs([shared_shm(folder)] * 2):
            assert "RIGHT hosts 1 nodes 1" in output
        assert os.listdir(folder) == []


def test_dev_shm_of_pod_is_empty_while_containers_run(tmp_path):
    with mounted(str(tmp_path), "size=64m") as folder:
        command = [str(harness.PROGRAMS / "join.py"), "wait"]
        prefixes = [PROCESSES + shared_shm(folder)] * 2
        with harness.started(command, 2, {"TFDIST_SECRET": "x"}, prefixes=prefixes) as processes:
            for rank in range(2):
                processes.await_output(rank, "SUM")
            assert os.listdir(folder) == []


UNUSABLE = {
    "read-only": (shm("ro"), "its /dev/shm cannot be written (Read-only file system)"),
    "too small": (shm("size=64k"), "MPI needs 100 KiB for each process"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_dev_shm_that_cannot_be_used(name):
    prefix, reason = UNUSABLE[name]
    for output in outputs([NOTHING, prefix], codes=(1, 1)):
        assert "MPIUnavailableError: MPI needs shared memory in /dev/shm; rank 1 on" in output
        assert reason in output
        assert "--shm-size" in output


@pytest.mark.skipif(not namespaces.AVAILABLE, reason="needs iproute2")
@pytest.mark.parametrize(
    "isolation", [NOTHING, sweep(PROCESSES), PROCESSES + IPC + shm("size=64m")], ids=["none", "PID", "all"]
)
def test_sums_are_right_between_network_namespaces(isolation):
    """Two containers with one hostname on a bridge, and whatever else is theirs."""
    cluster = {"worker": ["10.77.0.1:2222", "10.77.0.2:2222"]}
    with namespaces.hosts() as names:
        per_rank = [
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}
            for rank in range(2)
        ]
        prefixes = [["ip", "netns", "exec", name, *isolation] for name in names]
        with harness.started(SUMS, 2, {"TFDIST_SECRET": "x"}, per_rank, prefixes=prefixes) as processes:
            ended = processes.wait()
            assert [end.code for end in ended] == [0, 0], processes.outputs()
            for end in ended:
                assert f"RIGHT hosts {1 if isolation is NOTHING else 2}" in end.output


LAUNCHED = {
    "PID": (PROCESSES, 6, "MPICH assumes that rank 0 and rank 1 can read each other's memory, but"),
    # MPI waits with all of a core, and never starts: so it is given little time.
    "/dev/shm": (shm("size=64m"), 2, "MPI's initialization failed: MPI did not start within 2 s"),
}


@pytest.mark.skipif(not harness.MPIEXEC.exists(), reason="needs MPICH's mpiexec")
@pytest.mark.parametrize("name", LAUNCHED)
def test_containers_launched_as_one_node_raise(name):
    prefix, seconds, message = LAUNCHED[name]
    with subprocess.Popen(
        [str(harness.MPIEXEC), "-n", "2", *prefix, sys.executable, *SUMS],
        env=harness.environment(TFDIST_START_TIMEOUT=str(seconds)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=harness.DEADLINE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode != 0, output
    assert message in output
    assert "RIGHT" not in output
