"""The options of parameter servers in their job: each task publishes its own, and compares them with the chief's."""

from __future__ import annotations

import functools
import threading
import time

from tfdist.cluster import messages
from tfdist.errors import RendezvousError, TfdistError
from tfdist.notices import notice
from tfdist.parameter_server.options import published
from tfdist.parameter_server.options.published import Options
from tfdist.runtime.membership import Membership

_CHIEF = 0
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0


def agree(member: Membership, own: Options) -> None:
    """Publishes this task's options, and compares them: the chief with those of all others, others with the chief's.

    Nobody waits: of two tasks, the one that publishes last finds the other's.

    Args:
        member: of this task.
        own: its options.

    Raises:
        MismatchError: they differ.
    """
    control, cluster = member.control, member.cluster
    assert cluster is not None
    control.publish(_key(control.task), own.encode())
    others = range(1, len(cluster.tasks)) if control.task == _CHIEF else [_CHIEF]
    for task in others:
        text = control.request(functools.partial(_get, task, False))
        if text is not None:
            published.check_equal(own, published.decode(text), str(cluster.tasks[task]))


def learn(member: Membership, timeout: float) -> Options | None:
    """Waits for the options of a task that trains.

    Args:
        member: of a parameter server's task.
        timeout: seconds.

    Returns:
        The options; None if the job was over before any came.

    Raises:
        RendezvousError: none came in time.
        TfdistError: the job has failed.
    """
    control, cluster = member.control, member.cluster
    assert cluster is not None
    found = _Found()
    control.watch(found)
    control.when_failed(lambda error: found.event.set())
    for task in range(cluster.size):
        control.ask(functools.partial(_get, task, True), found.take)
    begun, told = time.monotonic(), False
    while not found.event.wait(_LOOK_SECONDS):
        waited = time.monotonic() - begun
        if waited > timeout:
            raise RendezvousError(
                f"no worker has made its ParameterServerStrategy within {timeout:g} s, of which this server has its "
                "options. Start the workers' script with the same cluster, or raise TFDIST_START_TIMEOUT."
            )
        if waited > _PATIENCE_SECONDS and not told:
            told = True
            notice("tfdist: waiting for a worker to make its ParameterServerStrategy.")
    if control.failure is not None:
        raise control.failure
    return None if found.text is None else published.decode(found.text)


class _Found:
    """What came first: options, or the end of the job.

    Attributes:
        event: set when something came.
        text: of the options; None for the end of the job.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.text: str | None = None

    def take(self, text: str | None) -> None:
        """Keeps the first options."""
        self.text = self.text or text
        self.event.set()

    def came(self, task: int) -> None:
        """Tasks publish by themselves."""

    def lost(self, task: int, error: TfdistError) -> None:
        """Another task may publish, or this one when it comes again."""

    def left(self, task: int) -> None:
        """Another task may publish."""

    def over(self) -> None:
        """No training task is left."""
        self.event.set()


def _get(task: int, wait: bool, id: int) -> messages.Get:
    return messages.Get(id, _key(task), wait)


def _key(task: int) -> str:
    return f"options of task {task}"
