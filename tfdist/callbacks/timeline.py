"""A callback that records a timeline of collectives."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import numpy as np

from tfdist.callbacks.processes import processes_of
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.clock import clock_offset
from tfdist.engine import timeline


class Timeline(keras.callbacks.Callback):
    """Records a timeline of the collectives of all ranks, and writes it to one file on the chief.

    Open the file in https://ui.perfetto.dev or chrome://tracing. Times are those of the chief's clock. On the command
    line, `tfdist run --timeline FILE` does the same for a whole script.

    Args:
        path: the path of the JSON file.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = str(path)
        self._before: timeline.EventRecorder | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to record the timeline."""
        group = processes_of(self.model)
        if group.is_writer and not os.access(os.path.dirname(os.path.abspath(self._path)), os.W_OK):
            raise OSError(f"the timeline {self._path} cannot be written: directory missing or not writable")
        self._before = group.engine.timeline
        offset = group.run("callbacks: the clocks", clock_offset())
        group.engine.timeline = timeline.EventRecorder(group.engine.rank, offset)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gathers the ranks' records and writes the file."""
        group = processes_of(self.model)
        recorded, group.engine.timeline = group.engine.timeline, self._before
        events = [] if recorded is None else recorded.events()
        encoded = np.frombuffer(json.dumps(events).encode() + b"\n", np.uint8)
        everyone, _ = group.run("callbacks: the timelines", all_gather_rows(encoded))
        if group.is_writer:
            events = [event for line in everyone.tobytes().splitlines() for event in json.loads(line)]
            timeline.write(self._path, events)
