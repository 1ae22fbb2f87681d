"""The `tfdist` command: its subcommands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tfdist._version import __version__
from tfdist.cli import bench, doctor, run, serve, status


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="tfdist", description="Keras 3 training on several processes and machines.")
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (run, serve, bench, doctor, status):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command line without the program's name; by default that of the process.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    return options.execute(options)
