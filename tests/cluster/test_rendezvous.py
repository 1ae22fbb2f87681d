import socket

import pytest

from tests.cluster.serving import DIGEST, SECRET, Task, bind, claims_of, enter
from tfdist.cluster import messages, rendezvous
from tfdist.cluster.settings import Timeouts
from tfdist.errors import RendezvousError


@pytest.fixture
def close():
    """Closes sockets at the end."""
    opened = []
    yield lambda connection: (opened.append(connection), connection)[1]
    for opened_socket in opened:
        opened_socket.close()


def test_listens_at_the_address(close):
    listener = close(rendezvous.listen("127.0.0.1:0"))
    host, port = listener.getsockname()
    assert host == "127.0.0.1"
    client = close(socket.create_connection((host, port), timeout=100))
    accepted, _ = listener.accept()
    close(accepted)
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"


def test_address_of_another_machine_listens_on_all_interfaces(close):
    """192.0.2.0/24 is for documentation: no machine has it."""
    listener = close(rendezvous.listen("192.0.2.1:0"))
    assert listener.getsockname()[0] == "0.0.0.0"


def test_port_in_use_raises(close):
    port = close(rendezvous.listen("127.0.0.1:0")).getsockname()[1]
    with pytest.raises(RendezvousError, match=f"cannot listen at 127.0.0.1:{port}: another process uses it: end that"):
        rendezvous.listen(f"127.0.0.1:{port}")


def test_a_port_can_be_used_again_at_once(close):
    """Also while the kernel keeps the connections of the job before."""
    listener = close(rendezvous.listen("127.0.0.1:0"))
    port = listener.getsockname()[1]
    client = close(socket.create_connection(("127.0.0.1", port), timeout=100))
    accepted, _ = listener.accept()
    accepted.close()  # this end waits in TIME_WAIT
    client.close()
    listener.close()
    close(rendezvous.listen(f"127.0.0.1:{port}"))


def test_unresolvable_own_address_raises():
    with pytest.raises(RendezvousError, match=r"own address nowhere\.invalid:22 cannot be resolved .* in TF_CONFIG"):
        rendezvous.listen("nowhere.invalid:22")


def test_the_server_process_serves_the_job_and_ends_with_it(monkeypatch):
    """The secret comes on standard input: others may read a process's environment."""
    monkeypatch.setenv("TFDIST_SECRET", SECRET.decode())
    listener = rendezvous.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    server = rendezvous.ServerProcess(listener, ["worker 0", "worker 1"], 2, DIGEST, SECRET, Timeouts())
    try:
        assert listener.fileno() == -1
        with Task(address) as stranger:
            assert "wrong or missing secret" in stranger.knock(claims_of(0), secret=b"another").why
        with enter(address, 0) as first, enter(address, 1) as second:
            assert bind([first, second]) == [[0, 1]] * 2
            with open(f"/proc/{server._process.pid}/environ", "rb") as environment:
                assert SECRET not in environment.read()
            for task in (first, second):
                task.say(messages.ScriptEnded(None, {}))
                task.say(messages.MPIShutDown())
            first.wait_for(messages.AllMPIShutDown)
    finally:
        server.close(20.0)
    assert server._process.returncode == 0


def test_a_server_that_does_not_end_is_ended():
    listener = rendezvous.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    server = rendezvous.ServerProcess(listener, ["worker 0"], 1, DIGEST, SECRET, Timeouts())
    with enter(address, 0) as task:
        bind([task])
        server.close(0.01)
        assert server._process.returncode == -9
        while task.hear() is not None:
            pass


def test_a_server_that_is_released_serves_those_that_are_left():
    listener = rendezvous.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    tasks = ["chief 0", "worker 0", "ps 0"]
    server = rendezvous.ServerProcess(listener, tasks, 2, DIGEST, SECRET, Timeouts(), is_elastic=True)
    with enter(address, 1) as worker:
        with enter(address, 0) as chief:
            chief.say(messages.ScriptEnded(None, {}))
        server.release()
        worker.say(messages.GetValue(1, "nothing", wait=False))
        assert worker.reply(1) is None
        worker.say(messages.ScriptEnded(None, {}))
    assert server._process.wait(20.0) == 0
