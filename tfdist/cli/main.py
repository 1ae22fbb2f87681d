"""The `tfdist` command: its subcommands and their arguments."""

from __future__ import annotations

import argparse
import importlib
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
    options = parser(given or COMMANDS).parse_args(arguments)
    return options.execute(options)
