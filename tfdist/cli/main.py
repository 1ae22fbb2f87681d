"""The `tfdist` command: its subcommands and their arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from tfdist._version import __version__

COMMANDS = "run", "serve", "bench", "doctor", "status"
"""Subcommands; each is a module of its name in this package."""


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Returns the parser of subcommands.

    Args:
        names: names of the subcommands; their modules are imported.
    """
    parser = argparse.ArgumentParser(prog="tfdist", description="Keras 3 training on several processes and machines.")
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name in names:
        importlib.import_module(f"tfdist.cli.{name}").add_parser(commands)
        commands.choices[name].set_defaults(command=commands.choices[name])
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command line without the program's name; by default that of the process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Only the module of the given subcommand: `tfdist run` needs no NumPy, which takes most of its start.
    given = [name for name in COMMANDS if name in arguments[:1]]
    _open_closed_streams()
    options, unknown = parser(given or COMMANDS).parse_known_args(arguments)
    if unknown:
        options.command.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return options.execute(options)
    except BrokenPipeError:  # as in `tfdist doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails as it flushes it at its end
        return 128 + signal.SIGPIPE


def _open_closed_streams() -> None:
    """Opens standard streams that were closed (``>&-``), as what is opened next would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
