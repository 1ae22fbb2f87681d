"""Long reports of failures are shortened: what failed first remains, and all of it is written into a file."""

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

SHOWN = 60
"""Maximum lines of a failure report that are shown."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed and report.longrepr is not None:
        text = str(report.longrepr)
        if text.count("\n") >= SHOWN:
            path = folder() / (re.sub(r"[^\w.-]+", "_", item.nodeid)[-150:] + f".{call.when}.txt")
            path.write_text(text)
            report.longrepr = shortened(text, SHOWN - 1) + f"\nThe whole report is in {path}."


@cache
def folder():
    """Where this session's reports are."""
    return Path(tempfile.mkdtemp(prefix="tfdist-failures-"))


def shortened(text, lines):
    """The most telling lines of a report.

    Args:
        text: a traceback of pytest's, which ends with the outputs of ranks, each below a line ``--- rank N ---``.
        lines: how many to keep.
    """
    before, *outputs = re.split(r"(?m)(?=^.*--- rank \d+)", text)
    parts = [last(before, lines // 3 if outputs else lines)]
    lines -= len(parts[0])
    for place, output in enumerate(outputs):
        left = len(outputs) - place - 1
        parts.append(last(output, max(3, lines // (2 if left else 1)), first=1))
        lines -= len(parts[-1])
    return "\n".join(line for part in parts for line in part)


def last(text, count, first=0):
    """The last lines of a text, and the first so many, with a line between that says how many are left out."""
    lines = text.rstrip("\n").splitlines()
    if len(lines) <= count:
        return lines
    kept = count - first - 1
    return [*lines[:first], f"[{len(lines) - first - kept} lines]", *lines[-kept:]]
