"""What tests cost: processor seconds and launches, by folder and by test (`pytest --costs`).

Seconds on a clock depend on what else runs; processor seconds add up over all processes that a test starts, also over
forks (`multiprocess/forking.py`), which are nobody's children here. What a fixture costs counts for the first test that
asks for it, and processes that nobody waits for count for nothing.

Processors differ, also one from itself on another day: the sums stand beside the seconds that an import takes.
"""

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess import forking, harness

SHOWN = 30
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help="show the processor seconds of folders and of tests")


def pytest_configure(config):
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(shows=not hasattr(config, "workerinput")))


def spent():
    """Processor seconds of this process, of its children that have ended, and of processes that fork for it."""
    parents = [process_seconds(parent.pid) for parent in forking.parents()]
    return sum(os.times()[:4]) + sum(parents)


def process_seconds(pid):
    """Processor seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def import_seconds():
    """Processor seconds of a process that imports TensorFlow and Keras: a fixed piece of work that fills the caches."""
    before = sum(os.times()[2:4])
    subprocess.run([sys.executable, "-c", "import tensorflow, keras"], stderr=subprocess.DEVNULL, check=True)
    return sum(os.times()[2:4]) - before


class Costs:
    """Counts around each test, wherever it runs, and shows the sums where pytest reports."""

    def __init__(self, shows):
        self._found = {}
        self._imports = import_seconds() if shows else None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self._before = spent(), harness.counts.launches, harness.counts.processes
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            now = spent(), harness.counts.launches, harness.counts.processes
            cost = [round(after - before, 2) for after, before in zip(now, self._before, strict=True)]
            item.user_properties.append(("cost", cost))
        yield

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._found[report.nodeid] = dict(report.user_properties)["cost"]

    def pytest_terminal_summary(self, terminalreporter):
        folders = collections.defaultdict(lambda: [0, 0.0, 0, 0])
        for name, cost in self._found.items():
            path = name.partition("::")[0]
            folder = path if "multiprocess/" in path else os.path.dirname(path)
            folders[folder] = [total + part for total, part in zip(folders[folder], (1, *cost), strict=True)]
        folders["all"] = [sum(parts) for parts in zip(*folders.values(), strict=True)]
        terminalreporter.section("costs")
        terminalreporter.write_line("    tests  cpu seconds  launches  processes")
        for folder, (tests, seconds, launches, processes) in sorted(folders.items(), key=lambda item: item[1][1]):
            terminalreporter.write_line(f"{tests:9d} {seconds:12.1f} {launches:9d} {processes:10d}  {folder}")
        imports = self._imports, import_seconds()
        terminalreporter.write_line(
            f"an import of TensorFlow and Keras takes {imports[0]:.2f} s before and {imports[1]:.2f} s after: "
            f"the sum is {2 * folders['all'][1] / sum(imports):.0f} times as much"
        )
        terminalreporter.write_line(f"the {SHOWN} dearest tests, in cpu seconds")
        for name, cost in sorted(self._found.items(), key=lambda item: item[1], reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{cost[0]:9.1f}  {name}")
