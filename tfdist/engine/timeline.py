"""A timeline of a rank's collectives, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The format is Chrome's trace events: every rank is a "process", with a track for its training (computing, or waiting for
a collective) and one for each key. Times are microseconds on rank 0's clock.

References:
    Google, Trace Event Format, 2016.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the launcher, which merges timelines, starts without the engine
    from tfdist.engine.pending import Pending

VARIABLE = "TFDIST_TIMELINE"
"""Environment variable with the path of the timeline; each rank writes its part to this path plus a suffix."""

MOST_RECORDS = 1_000_000
"""Maximum number of recorded collectives and waits; later ones are only counted."""


class Flight(NamedTuple):
    """One collective of this rank.

    Attributes:
        key: the key of the call site.
        call: number of earlier calls with that key.
        contents: description of the data.
        marks: times in seconds at which the data was ready, the collective was posted, and each of its steps ended.
    """

    key: str
    call: int
    contents: str
    marks: Sequence[float]


class WaitEvent(NamedTuple):
    """One wait of a thread of this rank, in seconds."""

    key: str
    begin: float
    end: float


class EventRecorder:
    """Records collectives and waits; called by the engine.

    Args:
        rank: this process's rank.
        offset: seconds from this process's clock to rank 0's clock; see `tfdist.collectives.clock`.
    """

    def __init__(self, rank: int, offset: float = 0.0) -> None:
        self.rank = rank
        self.offset = offset
        self.flights: list[Flight] = []
        self.waits: list[WaitEvent] = []
        self.left_out = 0

    def posted(self, pending: Pending) -> None:
        """Records the start of a collective."""
        pending.marks = [pending.ready, time.monotonic()]

    def stepped(self, pending: Pending) -> None:
        """Records the end of a step of a collective, which may be its last."""
        if not pending.marks:
            return  # the collective started before the timeline
        pending.marks.append(time.monotonic())
        if pending.done:
            self._keep(self.flights, Flight(pending.name, pending.call, pending.contents, pending.marks))

    @contextlib.contextmanager
    def waiting(self, pending: Pending) -> Iterator[None]:
        """Returns a context that records a wait for a collective."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._keep(self.waits, WaitEvent(pending.name, begin, time.monotonic()))

    def ran(self, pending: Pending, marks: Sequence[float]) -> None:
        """Records a collective that has run beside the engine, while a thread waited for it.

        Args:
            pending: the collective.
            marks: times in seconds at which it began, and at which each of its steps ended.
        """
        begin, *steps = marks
        self._keep(self.flights, Flight(pending.name, pending.call, pending.contents, [begin, begin, *steps]))
        self._keep(self.waits, WaitEvent(pending.name, begin, steps[-1]))

    def _keep(self, records: list[Any], record: Any) -> None:
        if len(self.flights) + len(self.waits) < MOST_RECORDS:
            records.append(record)
        else:
            self.left_out += 1

    def events(self) -> list[dict[str, Any]]:
        """Returns this rank's trace events."""
        tracks = {"training": 0}
        for flight in self.flights:
            tracks.setdefault(flight.key, len(tracks))
        named = [_named("process_name", self.rank, 0, f"rank {self.rank}")]
        named += [_named("thread_name", self.rank, track, name) for name, track in tracks.items()]
        events = [event for flight in self.flights for event in self._of_flight(flight, tracks[flight.key])]
        return [*named, *events, *self._of_training()]

    def _of_flight(self, flight: Flight, track: int) -> Iterator[dict[str, Any]]:
        ready, posted, *steps = flight.marks
        arguments = {"call": flight.call + 1, "contents": flight.contents}
        yield self._slice(flight.key, ready, steps[-1], track, {**arguments, "steps": len(steps)})
        yield self._slice("ready, until posted", ready, posted, track)
        begin = posted
        for number, end in enumerate(steps):
            yield self._slice(f"step {number + 1}", begin, end, track)
            begin = end

    def _of_training(self) -> Iterator[dict[str, Any]]:
        """Yields waits, with overlapping waits of several threads merged, and the computation between them."""
        end_of_last: float | None = None
        for wait in sorted(self.waits, key=lambda wait: wait.begin):
            begin = wait.begin
            if end_of_last is not None:
                if begin > end_of_last:
                    yield self._slice("computes", end_of_last, begin, 0)
                begin = max(begin, end_of_last)
            if wait.end > begin:
                yield self._slice("waits", begin, wait.end, 0, {"for": wait.key})
                end_of_last = wait.end

    def _slice(
        self, name: str, begin: float, end: float, track: int, arguments: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "X",
            "ts": (begin + self.offset) * 1e6,
            "dur": (end - begin) * 1e6,
            "pid": self.rank,
            "tid": track,
            "args": arguments or {},
        }

    def write_part(self, path: str) -> None:
        """Writes this rank's events beside the path, for `merge`."""
        _write(part(path, self.rank), self.events())


def part(path: str, rank: int) -> str:
    """Returns the path of a rank's part of the timeline at ``path``."""
    return f"{path}.rank{rank}"


def merge(path: str, ranks: int) -> list[int]:
    """Merges the parts into one file, if there are any; returns the ranks whose part is missing.

    Args:
        path: path of the merged file.
        ranks: number of parts.
    """
    events, missing = [], []
    for rank in range(ranks):
        try:
            events += json.loads(Path(part(path, rank)).read_text(encoding="utf-8"))["traceEvents"]
            os.unlink(part(path, rank))
        except (OSError, ValueError):
            missing.append(rank)
    if len(missing) < ranks:
        write(path, events)
    return missing


def write(path: str, events: Iterable[dict[str, Any]]) -> None:
    """Writes a timeline, with times relative to its beginning."""
    events = list(events)
    begin = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    _write(path, [{**event, "ts": event["ts"] - begin} if event["ph"] == "X" else event for event in events])


def _write(path: str, events: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _named(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
