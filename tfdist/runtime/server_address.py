"""Connects to parameter servers at the addresses that they publish over the rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Task
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.worker.client import Connection


def address_of(server: int) -> str:
    """Returns the key under which the leader of a parameter server publishes its address.

    Args:
        server: index of the parameter server.
    """
    return f"address of parameter server {server}"


def connection(
    control: Control,
    tasks: Sequence[Task],
    server: int,
    name: str,
    timeouts: Timeouts,
    has_copy: bool,
    failure: Callable[[], BaseException | None],
) -> Connection:
    """Waits until a parameter server has published its address, and returns a new connection to it.

    Args:
        control: this task's membership.
        tasks: the job's tasks, by number.
        server: number of the server's task.
        name: name of the server for messages.
        timeouts: the deadlines for waits for other tasks.
        has_copy: whether another task takes over when the server is lost. The rendezvous server decides that after the
            heartbeat deadline, so this task waits for twice as long.
        failure: function that returns why waits for the server are useless, or None; see `Connection`.

    Raises:
        RequestTimeoutError: the server did not publish its address in time.
    """
    key = address_of(tasks[server].index)

    def name_of(number: int) -> str:
        if number < len(tasks):
            return str(tasks[number])
        return control.present.get(number, f"task {number}")  # a worker that the cluster does not name

    return Connection(
        control.look_up(key),
        name,
        timeouts.heartbeat * (2 if has_copy else 1),
        Keys.of_secret(read_secret()),
        failure=failure,
        name_of=name_of,
        moved=lambda: control.known(key),
    )
