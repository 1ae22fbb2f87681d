"""Agreement on the options of parameter servers: each task publishes its options and compares them with the chief's."""

from __future__ import annotations

import threading
import time

from tfdist.cluster.control import Watcher
from tfdist.errors import RendezvousError
from tfdist.notices import notice
from tfdist.parameter_server.options import published
from tfdist.parameter_server.options.published import Options
from tfdist.runtime.membership import Membership

_CHIEF = 0
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0


def agree(member: Membership, options: Options) -> None:
    """Publishes this task's options. The chief compares them with all others' options, other tasks with the chief's.

    No task waits: of two tasks, the one that publishes last finds the other's options.

    Args:
        member: this task's membership.
        options: this task's options.

    Raises:
        MismatchError: the options differ.
    """
    control, cluster = member.control, member.cluster
    assert cluster is not None
    control.publish(_key(control.task), options.encode())
    others = range(1, len(cluster.tasks)) if control.task == _CHIEF else [_CHIEF]
    for task in others:
        text = control.known(_key(task))
        if text is not None:
            published.check_equal(options, published.decode(text), str(cluster.tasks[task]))


def wait_for_options(member: Membership, timeout: float) -> Options | None:
    """Waits until a training task has published its options, and returns them.

    Args:
        member: membership of a parameter server's task.
        timeout: seconds to wait.

    Returns:
        The options; None if the job was over before any were published.

    Raises:
        RendezvousError: no task published options in time.
        TfdistError: the job has failed.
    """
    control, cluster = member.control, member.cluster
    assert cluster is not None
    waiter = _OptionsWaiter()
    control.watch(waiter)
    control.when_failed(lambda error: waiter.event.set())
    for task in range(cluster.size):
        control.ask_for(_key(task), waiter.take)
    begun, told = time.monotonic(), False
    while not waiter.event.wait(_LOOK_SECONDS):
        waited = time.monotonic() - begun
        if waited > timeout:
            raise RendezvousError(
                f"no worker has made its ParameterServerStrategy, which gives this server its options, within "
                f"{timeout:g} s. Start the workers' script with the same cluster, or raise TFDIST_START_TIMEOUT."
            )
        if waited > _PATIENCE_SECONDS and not told:
            told = True
            notice("tfdist: waiting for a worker to make its ParameterServerStrategy.")
    if control.failure is not None:
        raise control.failure
    return None if waiter.text is None else published.decode(waiter.text)


class _OptionsWaiter(Watcher):
    """Waits for options or the end of the job.

    Attributes:
        event: event that is set when either has come.
        text: the encoded options; None at the end of the job.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.text: str | None = None

    def take(self, text: str | None) -> None:
        """Keeps the first options."""
        self.text = self.text or text
        self.event.set()

    def over(self) -> None:
        """Ends the wait, because no training task is left."""
        self.event.set()


def _key(task: int) -> str:
    return f"options of task {task}"
