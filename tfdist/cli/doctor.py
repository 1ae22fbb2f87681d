"""`tfdist doctor`: what a person needs to know before a long job."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser("doctor", help="check this machine and the cluster before a long job")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the findings; returns the number of problems."""
    return 0
