"""Calibration: measures the machines of a job, and stores the figures for choosing algorithms.

The figures that `tfdist bench` measures are stored in one file for each kind of job (machines, processes on each,
cores), in ``$XDG_CACHE_HOME/tfdist``, or at the path in ``TFDIST_CALIBRATION``. All ranks use rank 0's file, so that
they make the same choices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.collectives import ring
from tfdist.collectives.algorithms import AUTO
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.barrier import barrier
from tfdist.collectives.cost import TYPICAL, Calibration, Level
from tfdist.collectives.hierarchical import by_machine
from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Communicator
from tfdist.engine.group import ProcessGroup
from tfdist.errors import CalibrationError

VARIABLE = "TFDIST_CALIBRATION"

_LARGE_BYTES = 8 << 20
_SMALL_REPEATS, _LARGE_REPEATS, _RUNS = 200, 5, 5


def machine(hosts: Sequence[int]) -> dict[str, Any]:
    """Describes the conditions of a calibration: this machine, and the distribution of the job's processes.

    Args:
        hosts: number of each rank's machine, by rank.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "processes per machine": [len(ranks) for ranks in by_machine(tuple(hosts))],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def path_for(described: dict[str, Any]) -> Path:
    """Returns the path of a machine's calibration: ``TFDIST_CALIBRATION``, or a file in the cache directory."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "tfdist" / f"calibration-{digest}.json"


def store(calibration: Calibration, described: dict[str, Any]) -> Path:
    """Stores a calibration for `load`; returns the path."""
    path = path_for(described)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": described, "calibration": dataclasses.asdict(calibration)}, indent=2))
    return path


def load(described: dict[str, Any], rank: int = 0) -> Calibration | None:
    """Returns the stored calibration for a machine, or None.

    Raises:
        CalibrationError: the file is damaged, or was made on another machine or for another job.
    """
    path = path_for(described)
    if not path.exists() and VARIABLE not in os.environ:
        return None
    again = f"Run `tfdist bench` as this job is run, or unset {VARIABLE}."
    try:
        kept = json.loads(path.read_text())
        made_for, levels = kept["machine"], kept["calibration"]
        calibration = _calibration(levels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"rank {rank} cannot read the calibration {path}: {error!r}. {again}") from None
    if made_for != described:
        differs = "; ".join(
            f"{name}: {made_for.get(name)!r} in the file, {described.get(name)!r} on this rank"
            for name in described
            if made_for.get(name) != described.get(name)
        )
        raise CalibrationError(
            f"the calibration {path} was not made for the machines and processes of rank {rank} ({differs}). {again}"
        )
    return calibration


def _calibration(kept: dict[str, Any]) -> Calibration:
    return Calibration(
        Level(**kept["host"]),
        Level(**kept["network"]),
        float(kept["combine_seconds_per_byte"]),
        float(kept["call_seconds"]),
    )


def agreed(group: ProcessGroup, algorithm: str) -> Calibration | None:
    """Returns the calibration of the group's rank 0, on all ranks; None if the algorithm needs none. Eagerly only.

    Raises:
        CalibrationError: rank 0 cannot load its calibration; see `load`.
    """
    if group.size == 1:
        return None
    text = written(group).encode() if group.rank == 0 and algorithm == AUTO else b""
    key = f"the settings of sums {group.number('settings of sums')}"  # a text is compared where the key is new
    rows, _ = group.run(key, all_gather_rows(np.frombuffer(text, np.uint8)), f"the algorithm {algorithm}")
    return read(rows.tobytes().decode()) if algorithm == AUTO else None


def written(group: ProcessGroup) -> str:
    """Returns this process's calibration for the job that a group is part of, as text for `read`.

    Raises:
        CalibrationError: the calibration cannot be loaded; see `load`.
    """
    engine = group.engine
    return json.dumps(dataclasses.asdict(load(machine(engine.communicator.hosts), engine.rank) or TYPICAL))


def read(text: str) -> Calibration:
    """Parses the text of `written`."""
    return _calibration(json.loads(text))


def measure(group: ProcessGroup) -> Calibration:
    """Measures latency, bandwidth and the speed of combining. Call it on all ranks."""
    machines = by_machine(group.hosts)
    local_ranks = next(ranks for ranks in machines if group.rank in ranks)
    host = _level(group, local_ranks) if max(map(len, machines)) > 1 else TYPICAL.host
    network = _level(group, [ranks[0] for ranks in machines]) if len(machines) > 1 else TYPICAL.network
    return Calibration(host, network, _slowest(group, _combining(group)), _slowest(group, _calling(group)))


def _level(group: ProcessGroup, circle: list[int]) -> Level:
    """Measures messages in a ring of ranks that all send at once; the other ranks only take part in barriers."""
    small = _slowest(group, _seconds(group, circle, 8, _SMALL_REPEATS))
    large = _slowest(group, _seconds(group, circle, _LARGE_BYTES, _LARGE_REPEATS))
    return Level(small, max(large - small, 1e-12) / _LARGE_BYTES)


def _seconds(group: ProcessGroup, circle: list[int], nbytes: int, repeats: int) -> float:
    outgoing, incoming = (group.take(nbytes) for _ in range(2))
    outgoing[...] = 0
    best = 0.0
    for run in range(_RUNS):
        group.run("calibration: barrier", barrier())
        if group.rank in circle and len(circle) > 1:
            begin = time.perf_counter()
            plan = _around(outgoing, incoming, repeats)
            group.subgroup(tuple(circle)).run(f"calibration: {nbytes} bytes", plan)
            seconds = (time.perf_counter() - begin) / repeats
            best = seconds if run == 0 else min(best, seconds)
    return best


def _around(outgoing: np.ndarray, incoming: np.ndarray, repeats: int) -> Plan:
    def schedule(comm: Communicator, tag: int) -> Schedule:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(repeats):
            yield (comm.receive(incoming, left, tag), comm.send(outgoing, right, tag))

    return schedule


def _combining(group: ProcessGroup) -> float:
    """Measures the seconds per byte of adding float32 on all ranks at once; from memory, not cache, like gradients."""
    terms = np.ones(_LARGE_BYTES, np.float32), np.ones(_LARGE_BYTES, np.float32)
    best = float("inf")
    for _ in range(_RUNS):
        group.run("calibration: barrier", barrier())
        begin = time.perf_counter()
        np.add(*terms, out=terms[1])
        best = min(best, (time.perf_counter() - begin) / terms[0].nbytes)
    return best


def _calling(group: ProcessGroup) -> float:
    """Measures the seconds of a collective without messages."""

    def nothing(comm: Communicator, tag: int) -> Schedule:
        return
        yield

    group.run("calibration: nothing", nothing)
    begin = time.perf_counter()
    for _ in range(_SMALL_REPEATS):
        group.run("calibration: nothing", nothing)
    return (time.perf_counter() - begin) / _SMALL_REPEATS


def _slowest(group: ProcessGroup, seconds: float) -> float:
    buffer = np.array([seconds])
    group.run("calibration: slowest", ring.all_reduce(buffer, np.maximum))
    return float(buffer[0])
