"""Leaves the job at the end of a process: waits for the others in MPI's world, shuts MPI down, and reports errors."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from traceback import extract_tb
from types import TracebackType
from typing import Any

from tfdist import notices
from tfdist.cluster import interrupts, launcher
from tfdist.cluster.control import Control
from tfdist.comm import mpi_library
from tfdist.engine import timeline
from tfdist.engine.engine import Engine
from tfdist.errors import MismatchError, PeerLostError, TfdistError
from tfdist.runtime.membership import LEAVE_SECONDS, Membership, StartedMPI

log = logging.getLogger("tfdist")

_POLL_SECONDS = 0.05
_FINALIZE_SECONDS = 10.0
_END_SECONDS = 2 * _FINALIZE_SECONDS


class _Watchdog:
    """Ends the process if `MPI_Finalize` does not return.

    Its thread is started early, because no thread can be started at the end of the process.
    """

    def __init__(self) -> None:
        self.begin, self.done = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="tfdist-watchdog", daemon=True).start()

    def _watch(self) -> None:
        self.begin.wait()
        if not self.done.wait(_FINALIZE_SECONDS):
            _die_at_the_end(f"MPI_Finalize did not end within {_FINALIZE_SECONDS:g} s")


def arrange(membership: Membership) -> None:
    """Arranges that this process leaves the job at its end, and tells the other tasks why if it fails.

    Args:
        membership: this process's membership.
    """
    atexit.register(_leave, membership, os.getpid(), _Watchdog())
    os.register_at_fork(after_in_child=membership.control.after_fork)
    sys.excepthook = _reporting_excepthook(membership, sys.excepthook)


def _reporting_excepthook(membership: Membership, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an excepthook that reports an error at once, because the process may wait for the user's threads."""
    control, cluster = membership.control, membership.cluster

    def report(error: BaseException, traceback: TracebackType | None) -> bool:
        if control.failure is not None or isinstance(error, PeerLostError):
            launcher.report_to_launcher(launcher.VICTIM)
        elif not isinstance(error, TfdistError):  # a `TfdistError` has been reported already
            control.fails_first = True
            control.tell_failure(error)
            launcher.report_to_launcher(launcher.CAUSE)
        is_interrupt = isinstance(error, KeyboardInterrupt) or str(error) == interrupts.INTERRUPTED
        if cluster is None or not launcher.is_tfdist_run() or not (is_interrupt or _is_of_an_interrupt(error)):
            return False
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks, but perhaps this one only now
        name = cluster.task if cluster.rank is None else f"rank {cluster.rank}"
        how = f"was interrupted{_where(traceback)}" if is_interrupt else f"ended{_where(traceback)}, because {error}"
        notices.say(f"tfdist: {name} {how.rstrip(': ')}.")
        return True

    return interrupts.excepthook(report, original)


def _is_of_an_interrupt(error: BaseException) -> bool:
    return isinstance(error, PeerLostError) and "failed: KeyboardInterrupt" in str(error)


def _where(traceback: TracebackType | None) -> str:
    """Returns the line of the script at which an error was raised, as text; a user has ended the job by Ctrl-C."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in extract_tb(traceback) if frame.filename == script]
    return f" at {script}:{lines[-1]}" if lines else ""


def _leave(membership: Membership, pid: int, watchdog: _Watchdog) -> None:
    """Leaves the job at the end of the process. A forked child does nothing."""
    if os.getpid() != pid or membership.is_closed:
        return
    error = getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}"[:1000] if error is not None else None
    if membership.started is None or membership.engine is None:
        _leave_without_mpi(membership, reason)
    else:
        _leave_with_mpi(membership, membership.started, membership.engine, watchdog, reason)


def _leave_without_mpi(membership: Membership, reason: str | None) -> None:
    control = membership.control
    if control.failure is not None and not control.fails_first:
        launcher.report_to_launcher(launcher.VICTIM)
    membership.leave(reason)


def _leave_with_mpi(
    membership: Membership, started: StartedMPI, engine: Engine, watchdog: _Watchdog, reason: str | None
) -> None:
    """Waits until the other ranks' scripts have ended too, and finalizes MPI with them."""
    control = membership.control
    _write_timeline(engine)
    known = engine.failure is not None or reason is not None  # the script has seen the error, and chosen how to end
    failed = known or control.failure is not None
    if (control.failure or engine.failure or engine.unnoticed) and not control.fails_first:
        launcher.report_to_launcher(launcher.VICTIM)
    control.leave(reason, engine.numbers.counts(), LEAVE_SECONDS if failed else 0.0)
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
        control.end(0)  # does not finalize MPI, which would wait for the lost ranks
    if started.manager:
        started.manager.release()
    membership.close()
    if not known and engine.unnoticed:
        _die_at_the_end(str(engine.unnoticed))
    if not known and isinstance(control.failure, (PeerLostError, MismatchError)):
        _end_after_failure(control)


def _end_after_failure(control: Control) -> None:
    """Reports a failure after the script's end. Only if a process has died, the exit code becomes 1."""
    if not control.peer_died:
        _say_at_the_end(str(control.failure))
        return
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # the exit functions of other libraries, as `os._exit` below skips them
    _die_at_the_end(str(control.failure))


def _die_of_others(error: TfdistError) -> None:
    launcher.report_to_launcher(launcher.VICTIM)
    _die_at_the_end(str(error))


def _die_at_the_end(why: str) -> None:
    _say_at_the_end(why)
    sys.stdout.flush()
    os._exit(1)


def _say_at_the_end(why: str) -> None:
    notices.say(f"tfdist: the job failed after this rank's script had ended: {why}")


def _write_timeline(engine: Engine) -> None:
    path = os.environ.get(timeline.VARIABLE)
    if path and engine.timeline:
        try:
            engine.timeline.write_part(path)
        except OSError as error:
            log.warning("tfdist: rank %d cannot write its timeline: %s", engine.rank, error)


def _await_others(control: Control, engine: Engine) -> bool:
    """Waits until every other task has left too or is lost, and drives transfers under way meanwhile.

    Returns:
        Whether MPI can be finalized, because no task is lost.
    """
    while not (control.departed.keys() | engine.lost.keys()) >= set(range(engine.size)):
        if control.failure:
            return False
        try:
            engine.advance()  # what this rank has sent may still be on its way
        except Exception:
            return False
        engine.communicator.progress()
        time.sleep(_POLL_SECONDS)
    return control.failure is None and not engine.lost
