"""TensorFlow's own connections between the processes of a group: set up once, watched, and cut after a failure.

TensorFlow does not know which process is missing from a sum, and where it ends a wait by itself, its threads may still
use what it has freed. So sums are counted in variables, a thread looks whether they go on, and the job decides.
"""

from __future__ import annotations

import atexit
import math
import socket
import threading
import time

import tensorflow as tf

from tfdist.cluster import hosts
from tfdist.cluster.control import Control, Watcher
from tfdist.engine.group import ProcessGroup
from tfdist.errors import MismatchError, TfdistError
from tfdist.private import tensorflow as private

_FIRST_KEY = 1 << 30
"""Number of the first group of devices; TensorFlow's strategies count theirs from 1."""
_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 1.0
"""Seconds between two looks at the counts."""
_LONG_SECONDS = 2.0
"""Seconds after which the wait in a sum is reported."""
_LAST_SECONDS = 10.0
"""Seconds that the last bytes of a sum may be on their way when another process's script has ended after it."""


class Links(Watcher):
    """TensorFlow's connections between the processes of a group; ends their sums when one of them cannot complete.

    Args:
        group: the processes.
        control: this process's membership in its job.
        task: prefix of the names of this process's devices.

    Attributes:
        group: as given.
        task: as given.
        failure: the error because of which no sum can complete any more; None if there is none.
        known: event that is set when there is such an error, and sums have been ended.
    """

    def __init__(self, group: ProcessGroup, control: Control, task: str) -> None:
        self.group = group
        self.task = task
        self.failure: TfdistError | None = None
        self.known = threading.Event()
        self._host = f"{task}/device:CPU:0"
        self._lines: dict[str, tuple[int, tf.Variable]] = {}
        with tf.device(self._host):
            self._begun, self._ended = (
                tf.Variable(tf.zeros([], tf.int64), trainable=False, name=f"tfdist_sums_{name}")
                for name in ("begun", "ended")
            )
        self._left = -math.inf  # time at which the last script of another process has ended
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tfdist-tensorflow-sums", daemon=True)
        control.watch(self)
        self._thread.start()
        atexit.register(self._end)  # a thread that is in TensorFlow while Python ends makes the process abort

    def line(self, device: str) -> tuple[int, tf.Variable]:
        """Returns the number of a group of devices, and a variable whose handle keeps the order of all of its sums.

        Args:
            device: this process's device in the group. All processes name theirs in the same order.
        """
        if device not in self._lines:
            with tf.device(device):
                order = tf.Variable(0.0, trainable=False, name="tfdist_order_of_sums")
            self._lines[device] = _FIRST_KEY + len(self._lines), order
        return self._lines[device]

    # Looking whether sums go on.

    def begin(self, vector: tf.Tensor) -> tf.Operation | None:
        """Counts a sum as begun once its tensor is there; returns the operation, which the sum has to follow."""
        with tf.control_dependencies([vector]), tf.device(self._host):
            return self._begun.assign_add(1, read_value=False)

    def end(self, total: tf.Tensor) -> None:
        """Counts a sum as ended once its result is there."""
        with tf.control_dependencies([total]), tf.device(self._host):
            self._ended.assign_add(1, read_value=False)

    def _look(self) -> None:
        """Runs the thread that reports a sum which does not go on, and ends it where the wait is in vain."""
        last, since = -1, time.monotonic()
        while not self._is_over.wait(_LOOK_SECONDS):
            begun = int(self._begun.numpy())  # first: a sum may begin and end between the two
            ended = int(self._ended.numpy())
            if begun > ended == last:
                if time.monotonic() - since > _LONG_SECONDS:
                    self._wait(ended, since)
            else:
                last, since = ended, time.monotonic()

    def _wait(self, ended: int, since: float) -> None:
        """Reports the wait in a sum to the job until it goes on.

        Args:
            ended: number of earlier sums.
            since: time at which the wait began, on `time.monotonic`.
        """
        engine, site = self.group.engine, self.group.site("sum by TensorFlow")
        pending, monitor = engine.beside.waits_for(site, "", has_order=False)
        pending.call = ended
        try:
            while self._ended.numpy() == ended and not self._is_over.wait(_LOOK_SECONDS):
                now = time.monotonic()
                if monitor is not None and now > self._left + _LAST_SECONDS:
                    monitor.check(now - since)
        except TfdistError as error:
            engine.fail(error, pending.members)
            self.failed(error)
        finally:
            engine.beside.over(pending)
            if monitor is not None:
                monitor.over()

    def _end(self) -> None:
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LONG_SECONDS)

    # Failures.

    def lost(self, task: int, error: TfdistError) -> None:
        """Ends sums, which need each process."""
        if task in self.group.members:
            self.failed(error)

    def left(self, task: int) -> None:
        """Has a sum go on for a while that may have all it needs of a process whose script has ended."""
        if task in self.group.members:
            self._left = time.monotonic()

    def failed(self, error: TfdistError) -> None:
        """Ends all sums, now and later."""
        self._is_over.set()
        if self.failure is None:
            self.failure = error
            private.abort_collectives(str(error))
            self.known.set()


_lock = threading.Lock()
_made: Links | None = None


def links(group: ProcessGroup, kind: str, host: str | None) -> Links:
    """Returns the process's connections, which are made when they are first asked for.

    Args:
        group: the processes.
        kind: kind of the device that this process sums on, such as ``"GPU"``.
        host: host of this process, as the others reach it; None for the address that leads to other machines.

    Raises:
        RuntimeError: TensorFlow has run an operation in this process, or connects other processes.
        MismatchError: the processes have devices of different kinds.
    """
    global _made
    with _lock:
        if _made is None:
            _made = _connected(group, kind, host)
        elif _made.group.members != group.members:
            raise RuntimeError(
                f"algorithm='tensorflow' sums among {_made.group} in this process, and cannot among {group}, too: "
                "TensorFlow is set up once. Use another algorithm for one of the two strategies."
            )
        return _made


def _connected(group: ProcessGroup, kind: str, host: str | None) -> Links:
    control = group.engine.control
    assert control is not None
    if len(set(group.hosts)) == 1:
        host = _LOOPBACK
    with socket.socket() as held:  # until TensorFlow listens there
        held.bind(("", 0))
        own = f"{host or hosts.outside_address()}:{held.getsockname()[1]}"
        given = control.gather(f"sums by TensorFlow of {group}", [own, kind], group.members)
    kinds = [kind for _, kind in given]
    if len(set(kinds)) > 1:
        raise MismatchError(
            "algorithm='tensorflow' needs devices of one kind on all processes; the ranks of "
            f"{group} have {', '.join(kinds)}"
        )
    try:
        task = private.enable_collectives([address for address, _ in given], group.rank)
    except RuntimeError as error:
        raise RuntimeError(
            "algorithm='tensorflow' must be set up before TensorFlow runs its first operation: make the strategy right "
            f"after the imports, and the data after it ({error})"
        ) from None
    except tf.errors.OpError as error:
        raise RuntimeError(f"TensorFlow cannot listen at {own} for algorithm='tensorflow': {error.message}") from None
    return Links(group, control, task)
