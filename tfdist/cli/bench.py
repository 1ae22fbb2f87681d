"""`tfdist bench`: measures latency, bandwidth and every all-reduce algorithm, and compares them with the cost model.

It is started like a training script: by `tfdist run -n N -m tfdist.cli bench`, with TF_CONFIG, by mpiexec or srun; or
with ``-n``, which starts N processes on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tfdist.cli.job import Job, Roles
from tfdist.cli.numbers import positive
from tfdist.cluster import discovery
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.barrier import barrier
from tfdist.collectives.cost import Calibration, CostModel, cheapest
from tfdist.engine import calibration
from tfdist.engine.engine import Engine
from tfdist.errors import TfdistError
from tfdist.runtime import world

_SECONDS_EACH = 0.3
_MOST_REPEATS = 100


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "bench",
        help="measure latency, bandwidth and every all-reduce algorithm on these machines",
        description="Measures these machines and every all-reduce algorithm, compares the algorithms with the cost "
        "model's prediction and bound, and stores the calibration from which "
        'AllReduceStrategy(algorithm="auto") chooses. Start it as the job itself is started (TF_CONFIG, mpiexec, '
        "srun), or with -n on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--processes", type=positive, help="number of processes to start on this machine")
    parser.add_argument(
        "--mib",
        type=_mib,
        nargs="+",
        default=[0.004, 0.0625, 1, 16, 64],
        metavar="SIZE",
        help="sizes of the vectors in MiB",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=list(ALGORITHMS),
        default=list(ALGORITHMS),
        help="algorithms to measure (default: all)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this JSON file")
    parser.add_argument("--plot", metavar="FILE", help="also draw the figures to this file (needs matplotlib)")
    parser.add_argument("--no-store", action="store_true", help="do not store the calibration")
    parser.set_defaults(execute=execute)


def _mib(text: str) -> float:
    size = float(text)
    if not 4 <= size * 2**20 < 2**40:
        raise argparse.ArgumentTypeError(f"expected a size in MiB, from 4 bytes to less than 1 TiB, got {text!r}")
    return size


@dataclass(frozen=True)
class Row:
    """The times of one algorithm at one size, in seconds; the prediction is None without a model."""

    algorithm: str
    nbytes: int
    measured: float
    predicted: float | None
    bound: float


def execute(options: argparse.Namespace) -> int:
    """Measures on all ranks, and prints the figures on rank 0; returns the exit code."""
    if options.plot and (lacking := _without_matplotlib()):
        print(lacking, file=sys.stderr)
        return 2
    for path in filter(None, (options.json, options.plot)):
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            print(f"tfdist bench: {path} cannot be written: directory missing or not writable", file=sys.stderr)
            return 2
    if options.processes:
        return _start(options)
    try:
        entered = world.enter(discovery.discover(None), Timeouts.from_environment())
    except TfdistError as error:
        print(f"tfdist bench: {error}", file=sys.stderr)
        return 1
    if entered.size == 1:
        print(
            "tfdist bench: expected several processes, got one. Start it as the job is started (TF_CONFIG, mpiexec, "
            "srun), or with `tfdist bench -n 2`.",
            file=sys.stderr,
        )
        return 2
    measured = calibration.measure(entered.group)
    model = CostModel(entered.group.hosts, measured)
    rows = [
        _row(entered.engine, model, name, int(mib * 2**20) // 4 * 4)
        for mib in options.mib
        for name in options.algorithms
    ]
    if entered.group.is_writer:
        _show(model, rows)
        described = calibration.machine(entered.group.hosts)
        if options.json:
            _write(options.json, described, measured, rows)
        if options.plot:
            _draw(options.plot, rows)
        if not options.no_store:
            try:
                print(f'Calibration stored in {calibration.store(measured, described)}, for algorithm="auto".')
            except OSError as error:
                print(f"tfdist bench: the calibration cannot be stored: {error}", file=sys.stderr)
                return 1
    return 0


def _start(options: argparse.Namespace) -> int:
    """Starts this command again as several processes."""
    arguments = ["--mib", *map(repr, options.mib), "--algorithms", *options.algorithms]
    for flag in ("json", "plot"):
        if path := getattr(options, flag):
            arguments += [f"--{flag}", path]
    if options.no_store:
        arguments.append("--no-store")
    command = [sys.executable, "-u", "-m", "tfdist.cli", "bench", *arguments]
    return Job(command, Roles(options.processes), share_cores=True, show_all=False).run()


def _row(engine: Engine, model: CostModel, name: str, nbytes: int) -> Row:
    measured = _seconds(engine, name, nbytes)
    predicted = None if name == "mpi" else model.seconds(name, nbytes)
    return Row(name, nbytes, measured, predicted, model.bound(nbytes))


def _seconds(engine: Engine, name: str, nbytes: int) -> float:
    """Returns the slowest rank's median seconds of an all-reduce of float32 that all ranks begin together."""
    buffer = engine.communicator.take(nbytes).view(np.float32)
    buffer[...] = 0
    key = f"bench: {name} {nbytes}"

    def once() -> float:
        engine.run("bench: barrier", barrier())
        begin = time.perf_counter()
        engine.run(key, ALGORITHMS[name](buffer))
        return time.perf_counter() - begin

    once()
    estimate = _slowest(engine, once())
    repeats = int(np.clip(_SECONDS_EACH / estimate, 3, _MOST_REPEATS))
    return _slowest(engine, float(np.median([once() for _ in range(repeats)])))


def _slowest(engine: Engine, seconds: float) -> float:
    buffer = np.array([seconds])
    engine.run("bench: slowest", ALGORITHMS["butterfly"](buffer, np.maximum))
    return float(buffer[0])


def _show(model: CostModel, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=100, highlight=False)
    measured, machines = model.calibration, len(set(model.hosts))
    console.print(f"{len(model.hosts)} processes on {machines} machine{'s' if machines > 1 else ''}")
    if machines < len(model.hosts):
        console.print(f"inside a machine: {_level(measured.host)}")
    if machines > 1:
        console.print(f"between machines: {_level(measured.network)}")
    console.print(f"adding float32:   {1e-9 / measured.combine_seconds_per_byte:.2f} GB/s")
    table = Table("size", "algorithm", title="All-reduce of float32")
    for column in ("measured", "predicted", "of the bound", "GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        best = cheapest(model.hosts, row.nbytes, measured) == row.algorithm
        table.add_row(
            _size(row.nbytes),
            row.algorithm + (" (auto)" if best else ""),
            _milliseconds(row.measured),
            "—" if row.predicted is None else _milliseconds(row.predicted),
            f"{row.bound / row.measured:.0%}",
            f"{row.nbytes / row.measured / 1e9:.2f}",
            end_section=row is rows[-1] or rows[rows.index(row) + 1].nbytes != row.nbytes,
        )
    console.print(table)


def _level(level: Any) -> str:
    return f"{level.latency * 1e6:.1f} µs a message, {1e-9 / level.seconds_per_byte:.2f} GB/s"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.4g} KiB"


def _write(path: str, described: dict[str, Any], measured: Calibration, rows: list[Row]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        figures = {"machine": described, "calibration": asdict(measured), "rows": [asdict(row) for row in rows]}
        json.dump(figures, file, indent=2)


def _without_matplotlib() -> str | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "tfdist bench --plot needs matplotlib: `pip install matplotlib`"
    return None


def _draw(path: str, rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    sizes = sorted({row.nbytes for row in rows})
    axes.plot([size / 2**20 for size in sizes], [_of(rows, size, lambda r: r.bound) for size in sizes], "k:")
    axes.text(sizes[-1] / 2**20, _of(rows, sizes[-1], lambda r: r.bound), " bound", va="center")
    for name in dict.fromkeys(row.algorithm for row in rows):
        points = [row for row in rows if row.algorithm == name]
        mib = [row.nbytes / 2**20 for row in points]
        (line,) = axes.plot(mib, [row.measured * 1e3 for row in points], "o-", label=name)
        if points[0].predicted is not None:
            axes.plot(
                mib, [(row.predicted or 0.0) * 1e3 for row in points], "--", color=line.get_color(), linewidth=0.8
            )
    axes.set(xscale="log", yscale="log", xlabel="MiB", ylabel="milliseconds (dashed: predicted)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def _of(rows: list[Row], nbytes: int, figure: Callable[[Row], float]) -> float:
    """Returns a figure in milliseconds from the first row of a size."""
    return next(figure(row) * 1e3 for row in rows if row.nbytes == nbytes)
