"""`tfdist run`: starts a script as several processes on this machine and supervises them."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from tfdist.cli.job import Job, Roles
from tfdist.cli.numbers import count, positive
from tfdist.cli.outputs import KEPT_LINES
from tfdist.engine import timeline
from tfdist.errors import ClusterSpecError


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "run",
        help="start a script as several processes on this machine",
        description="Starts a script as N processes on this machine, each with its own TF_CONFIG, cores and GPU. When "
        "one of them fails, the others are ended (except with --keep-going), and its exit code is returned. A "
        "parameter server or an evaluator that fails ends no other process.",
    )
    parser.add_argument("-n", "-np", "--processes", type=positive, required=True, help="number of training processes")
    parser.add_argument("--ps", type=count, default=0, metavar="N", help="number of parameter servers beside them")
    parser.add_argument("--evaluators", type=count, default=0, metavar="N", help="number of evaluators beside them")
    parser.add_argument(
        "--output",
        choices=("chief", "all"),
        default="chief",
        help="output to show: rank 0's, and another process's only if it fails (default); or that of all, with the "
        "process's name before each line, stdout on stdout and stderr on stderr",
    )
    parser.add_argument(
        "--logs",
        metavar="FOLDER",
        help="also write the whole output of each process that is not shown to this folder; without it, only the last "
        f"{KEPT_LINES} lines are kept, to be shown if the process fails",
    )
    parser.add_argument(
        "--cores",
        choices=("share", "all"),
        default="share",
        help="each process gets an equal share of the cores (default), or may use all of them",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="record when every rank's collectives are ready, posted, under way, done and waited for; "
        "FILE opens in https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="when a process fails, do not end the others: those that share no group with it go on",
    )
    parser.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="N",
        help="start failed training processes again, N times in all: for strategies whose processes come and go",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="Python script to start")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # for the message where there is no script, before Python 3.13
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the process that failed first, or 0."""
    if not options.module and not os.path.exists(options.script):
        runs_python = os.path.basename(options.script).startswith("python") and options.arguments
        hint = f"; give the script without python: tfdist run … {' '.join(options.arguments)}" if runs_python else ""
        print(f"tfdist run: there is no file {options.script}{hint}", file=sys.stderr)
        return 2
    script = ["-m", options.script] if options.module else [options.script]
    command = [sys.executable, "-u", *script, *options.arguments]
    path = options.timeline and os.path.abspath(options.timeline)
    if path and (os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK)):
        what = "it is a folder" if os.path.isdir(path) else "directory missing or not writable"
        print(f"tfdist run: {path} cannot be written: {what}", file=sys.stderr)
        return 2
    if path:
        os.environ[timeline.VARIABLE] = path
    if options.logs:
        try:
            os.makedirs(options.logs, exist_ok=True)
        except OSError as error:
            print(f"tfdist run: cannot make the folder {options.logs}: {error.strerror}", file=sys.stderr)
            return 2
    share_cores, show_all = options.cores == "share", options.output == "all"
    roles = Roles(options.processes, options.ps, options.evaluators)
    job = Job(command, roles, share_cores, show_all, options.logs, options.keep_going, options.restarts)
    try:
        code = job.run()
    except ClusterSpecError as error:
        print(f"tfdist run: {error}", file=sys.stderr)
        return 2
    if path:
        _tell_of_timeline(path, options.processes)
    return code


def _tell_of_timeline(path: str, ranks: int) -> None:
    try:
        missing = timeline.merge(path, ranks)
    except OSError as error:
        print(f"tfdist run: cannot write the timeline: {error}", file=sys.stderr)
        return
    if len(missing) == ranks:
        print(
            f"tfdist run: no timeline in {path}: no rank has recorded a collective. Rounds of a quorum and parameter "
            "servers, which exchange messages, are not recorded.",
            file=sys.stderr,
        )
        return
    without = f", without rank {', '.join(map(str, missing))}, which wrote nothing" if missing else ""
    print(f"tfdist run: timeline in {path}{without}; open it in https://ui.perfetto.dev", file=sys.stderr)
