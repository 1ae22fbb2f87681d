"""Where parameter servers are, as the rendezvous knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Task
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.worker.client import Connection


def address_of(server: int) -> str:
    """The key under which the task that leads a server publishes its address.

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
    """A new connection to a server, when it has published its address.

    Args:
        control: of this task.
        tasks: of the job.
        server: number of the server's task.
        name: of the server in messages.
        timeouts: how long to wait.
        has_copy: whether another task takes over when the server is lost. The rendezvous decides that after as much
            silence as this task would wait, so this one waits for twice as long.
        failure: as of `Connection`.

    Raises:
        RequestTimeoutError: it did not come in time.
    """
    key = address_of(tasks[server].index)

    def name_of(number: int) -> str:
        if number < len(tasks):
            return str(tasks[number])
        return control.present.get(number, f"task {number}")  # a worker that the cluster does not name

    return Connection(
        *(control.look_up(key), name, timeouts.heartbeat * (2 if has_copy else 1), Keys.of_secret(read_secret())),
        failure=failure,
        name_of=name_of,
        moved=lambda: control.known(key),
    )
