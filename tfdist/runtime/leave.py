"""How a process leaves its job: it waits for the others to end with it, takes MPI down, and says what went wrong."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster import launcher
from tfdist.cluster.control import Control
from tfdist.comm import mpi_library
from tfdist.engine import timeline
from tfdist.engine.engine import Engine
from tfdist.errors import MismatchError, PeerLostError, TfdistError
from tfdist.runtime.start import Started

log = logging.getLogger("tfdist")

_POLL_SECONDS = 0.05
_FINALIZE_SECONDS = 10.0
_END_SECONDS = 2 * _FINALIZE_SECONDS


def arrange(started: Started, engine: Engine) -> None:
    """Has this process leave the job when it ends, and tell the others why where it fails.

    Args:
        started: to be taken down.
        engine: of the same processes.
    """
    atexit.register(_leave, started, engine, os.getpid(), _Watchdog())
    os.register_at_fork(after_in_child=started.control.after_fork)
    sys.excepthook = _telling_others(started.control, sys.excepthook)


def _telling_others(control: Control, original: Callable[..., Any]) -> Callable[..., Any]:
    """Says why this task ends as soon as it is known: the end itself may wait for threads of the user's."""

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if control.failure is not None:
            launcher.tell(launcher.VICTIM)
        elif not isinstance(error, TfdistError):  # those have been told already
            control.fails_first = True
            control.tell_failure(error)
            launcher.tell(launcher.CAUSE)
        original(kind, error, traceback)

    return hook


class _Watchdog:
    """Ends the process if `MPI_Finalize` does not; a thread made in time, as none can be at the end."""

    def __init__(self) -> None:
        self.begin, self.done = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True).start()

    def _watch(self) -> None:
        self.begin.wait()
        if not self.done.wait(_FINALIZE_SECONDS):
            _die_at_the_end(f"MPI_Finalize did not end within {_FINALIZE_SECONDS:g} s")


def _leave(started: Started, engine: Engine, pid: int, watchdog: _Watchdog) -> None:
    """At the end of the process: announces it, waits until the others have ended too, and finalizes MPI."""
    control = started.control
    if os.getpid() != pid:
        return  # a forked child; the job is its parent's
    _write_timeline(engine)
    error = getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error is not None else None
    known = engine.failure is not None or error is not None  # the script has seen it, and ends as it chose to
    failed = known or control.failure is not None
    if (control.failure is not None or engine.failure is not None) and not control.fails_first:
        launcher.tell(launcher.VICTIM)
    control.leave(reason[:1000] if reason else None, engine.counts())
    if not failed:
        failed = not _await_others(control, engine)
    engine.close()
    if not failed:
        control.when_failed(_die_of_others)
        watchdog.begin.set()
        mpi_library.finalize(started.module)
        watchdog.done.set()
        control.when_failed(None)
        control.end(_END_SECONDS)
    elif engine.lost and control.failure is None:
        control.end(0)  # without MPI, which waits for the lost
    if started.manager:
        started.manager.release()
    control.close()
    if started.server:
        started.server.close()
    if not known and isinstance(control.failure, (PeerLostError, MismatchError)):
        _end_after_failure(control)


def _end_after_failure(control: Control) -> None:
    """Says what the script, which has ended, could not see. Its own exit code stays, unless a process has died."""
    if not control.peer_died:
        _say_at_the_end(str(control.failure))
        return
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # those of other libraries; nothing but this changes the exit code now
    _die_at_the_end(str(control.failure))


def _die_of_others(error: TfdistError) -> None:
    launcher.tell(launcher.VICTIM)
    _die_at_the_end(str(error))


def _die_at_the_end(why: str) -> None:
    _say_at_the_end(why)
    sys.stdout.flush()
    os._exit(1)


def _say_at_the_end(why: str) -> None:
    print(f"tfdist: the job failed after this rank's script had ended: {why}", file=sys.stderr, flush=True)


def _write_timeline(engine: Engine) -> None:
    path = os.environ.get(timeline.VARIABLE)
    if path and engine.timeline:
        try:
            engine.timeline.write_part(path)
        except OSError as error:
            log.warning("tfdist: rank %d cannot write its timeline: %s", engine.rank, error)


def _await_others(control: Control, engine: Engine) -> bool:
    """Waits until every other task has left too, or is lost to others, driving transfers under way meanwhile.

    Returns:
        Whether MPI can be finalized: none is lost.
    """
    while len(control.departed.keys() | engine.lost.keys()) < engine.size:
        if control.failure:
            return False
        try:
            engine.advance()  # what this rank has sent may still be on its way
        except Exception:
            return False
        engine.communicator.progress()
        time.sleep(_POLL_SECONDS)
    return control.failure is None and not engine.lost
