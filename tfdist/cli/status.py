"""`tfdist status`: shows the state of the parameter servers of a running job."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfdist.cli.numbers import seconds
from tfdist.cluster import spec
from tfdist.cluster.settings import read_secret
from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.messages import Inspect, ServerReport
from tfdist.parameter_server.protocol.report import ModelReport, merge_reports
from tfdist.parameter_server.worker.client import Connection

_TIMEOUT = 10.0
_ZMTP = b"\xff"
"""The first byte of ZeroMQ's greeting."""
_WHERE = 'The addresses of parameter servers are those of the job "ps" in TF_CONFIG; `tfdist run --ps` shows one.'


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "status",
        help="show what the parameter servers of a running job are doing",
        description="Asks a parameter server, and through it all others of its job, and shows a table of the workers "
        "of each model until Ctrl-C. It needs the job's TFDIST_SECRET, if there is one.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        help='host:port of a parameter server, as in TF_CONFIG (job "ps"); by default the first one of this '
        "environment's TF_CONFIG. `tfdist run` shows it when it starts",
    )
    parser.add_argument(
        "--seconds", type=seconds, default=1.0, help="seconds between two updates of the table (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="show one table and end")
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    console = Console()
    try:
        address = options.address or _address_in_environment()
        with contextlib.ExitStack() as stack:
            _check(address)
            connections = [_connected(stack, address)]
            first = _report(connections[0])
            connections += [_connected(stack, other) for other in first.servers if other != address]
            before, then = _asked(connections), time.monotonic()
            if options.once:
                console.print(rendered(before, None, 0.0))
                return 0
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(options.seconds)
                    reports, now = _asked(connections), time.monotonic()
                    live.update(rendered(reports, before, now - then), refresh=True)
                    before, then = reports, now
    except TfdistError as error:
        print(f"tfdist status: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _address_in_environment() -> str:
    """Returns the first parameter server's address in TF_CONFIG.

    Raises:
        TfdistError: TF_CONFIG names no parameter server.
    """
    cluster = spec.from_tf_config(os.environ.get("TF_CONFIG", ""))
    addresses = [task.address for task in cluster.tasks if task.job == "ps"] if cluster is not None else []
    if not addresses:
        raise TfdistError(f"expected host:port of a parameter server, or TF_CONFIG with one. {_WHERE}")
    return addresses[0]


def _check(address: str) -> None:
    """Finds out why an address is wrong, before a request to it would have to wait until its deadline.

    Raises:
        TfdistError: no parameter server listens at the address.
    """
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdecimal()):
        raise TfdistError(f"expected host:port of a parameter server; got {address!r}. {_WHERE}")
    try:
        with socket.create_connection(spec.split_address(address), _TIMEOUT) as connection:
            connection.settimeout(_TIMEOUT)
            first = connection.recv(1)
    except ConnectionRefusedError:
        raise TfdistError(
            f"nothing listens at {address}: the job has ended, or has not begun yet, or this is the address of a "
            f"worker or an evaluator, which do not listen. {_WHERE}"
        ) from None
    except OSError as error:
        raise TfdistError(f"{address} cannot be reached: {error}. {_WHERE}") from None
    if first == b"{":
        raise TfdistError(f"{address} is the address of the job's chief. {_WHERE}")
    if first != _ZMTP:
        raise TfdistError(f"the process that listens at {address} is not a parameter server of tfdist. {_WHERE}")


def _connected(stack: contextlib.ExitStack, address: str) -> Connection:
    made = Connection(address, "the parameter server", _TIMEOUT, Keys.of_secret(read_secret()))
    stack.callback(made.close)
    return made


def _report(connection: Connection) -> ServerReport:
    report: ServerReport = connection.request(Inspect)[0]
    return report


def _asked(connections: Sequence[Connection]) -> list[ServerReport]:
    return [_report(connection) for connection in connections]


def rendered(reports: Sequence[ServerReport], before: Sequence[ServerReport] | None, interval: float) -> Group:
    """Returns a table of the workers for each model.

    Args:
        reports: reports of all servers.
        before: earlier reports, from which rates are computed; None shows no rates.
        interval: seconds since the earlier reports.
    """
    earlier = {} if before is None else _models(before)
    parts: list[Any] = []
    for key, model in _models(reports).items():
        last = earlier.get(key)
        parts.append(Text(_headline(model, last, interval), style="bold"))
        parts.append(_table(model, reports[0].tasks, last, interval))
    return Group(*parts) if parts else Group(Text("No worker has begun a model yet."))


def _models(reports: Sequence[ServerReport]) -> dict[tuple[str, int], ModelReport]:
    by_model: dict[tuple[str, int], list[ModelReport]] = {}
    for report in reports:
        for model in report.models:
            by_model.setdefault((model.model, model.occurrence), []).append(model)
    return {key: merge_reports(parts) for key, parts in by_model.items()}


def _headline(model: ModelReport, last: ModelReport | None, seconds: float) -> str:
    pushes = sum(model.staleness.values())
    mean = sum(staleness * count for staleness, count in model.staleness.items()) / pushes if pushes else 0.0
    rates = ""
    if last is not None and seconds > 0:
        moved = (model.received - last.received + model.sent - last.sent) / seconds / 2**20
        rates = f", {(model.version - last.version) / seconds:,.0f} a second, {moved:,.1f} MiB/s"
    return (
        f"{model.model}: {model.nbytes / 2**20:,.1f} MiB; {model.version:,} updates{rates}; staleness {mean:.1f}, at "
        f"most {max(model.staleness, default=0)}"
    )


def _table(model: ModelReport, tasks: Sequence[str], last: ModelReport | None, seconds: float) -> Table:
    table = Table()
    for place, title in enumerate(("worker", "pushes", "a second", "dropped", "step", "waited", "")):
        table.add_column(title, justify="right" if 0 < place < 6 else "left")
    pushed = {worker.number: worker.counted for worker in last.workers} if last is not None else {}
    for worker in model.workers:
        name = tasks[worker.number] if worker.number < len(tasks) else f"task {worker.number}"
        rate = (
            f"{(worker.counted - pushed[worker.number]) / seconds:,.1f}"
            if seconds > 0 and worker.number in pushed
            else ""
        )
        state = "trains" if worker.is_active else "pauses" if worker.is_there else "gone"
        table.add_row(
            name,
            f"{worker.counted:,}",
            rate,
            f"{worker.dropped:,}",
            f"{worker.clock:,}",
            f"{worker.waited:,.1f} s",
            state,
        )
    return table
