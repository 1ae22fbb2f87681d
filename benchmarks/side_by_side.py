"""Runs a measurement as several processes, and reads rank 0's report."""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys

MARK = "MEASURED "


def report(figures):
    """Reports figures; called by the measured process on rank 0."""
    print(MARK + json.dumps(figures), flush=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def installed(module):
    return importlib.util.find_spec(module) is not None


def of_one_core():
    """The environment of a process that computes on one core, in a job of a secret that is none."""
    return {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TFDIST_SECRET": "benchmark",
    }


def measure(command, size=1, env=None, **options):
    """Runs a command, with one core per process, and returns its last report; see `measure_each`."""
    return measure_each(command, size, env, **options)[-1]


def measure_each(command, size=1, env=None, way="plain", cores=None, deadline=600, launcher=(), python=sys.executable):
    """Runs a command, with one core per process, and returns the reports of its processes.

    Args:
        command: Python script and arguments.
        size: number of processes.
        env: more environment variables; a function of the rank, or a mapping.
        way: "plain" starts each process with its rank and size as arguments; "tfdist" and "mpiexec" by a launcher.
        deadline: in seconds; None for none.
        cores: whether each process is pinned to a core; by default where there are enough.
        launcher: more arguments of `tfdist run`.
        python: the interpreter of processes that are started "plain".
    """
    from tfdist.cli import resources

    available = sorted(os.sched_getaffinity(0))
    pinned = cores if cores is not None else size <= len(available)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
    binary = os.path.dirname(sys.executable)
    if way == "tfdist":
        commands = [[sys.executable, "-m", "tfdist.cli", "run", "-n", str(size), *launcher, *command]]
    elif way == "mpiexec":
        commands = [[f"{binary}/mpiexec", "-n", str(size), sys.executable, *command]]
    else:
        port = str(free_port())
        commands = [[python, *command, str(rank), str(size), port] for rank in range(size)]
    popens = []
    for rank, arguments in enumerate(commands):
        core = {available[rank]} if pinned and way == "plain" else set(available)
        popens.append(
            subprocess.Popen(
                arguments,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=resources.at_start(sorted(core)),  # they also end when this process is killed
            )
        )
    return all_reported(popens, deadline)


def all_reported(popens, deadline=600):
    """Waits for the processes of a measurement, and returns what they reported, in their order."""
    try:
        outputs = [popen.communicate(timeout=deadline) for popen in popens]
    finally:
        for popen in popens:
            popen.kill()
    for popen, (out, err) in zip(popens, outputs, strict=True):
        if popen.returncode:
            raise RuntimeError(f"{popen.args} exited with code {popen.returncode}\n{out}\n{err}")
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith(MARK)]
    return [json.loads(line[len(MARK) :]) for line in lines]


def table(rows, columns, title):
    """Prints rows (name, values by column) as a table."""
    print(f"\n{title}")
    width = max(len(name) for name, _ in rows)
    wide = max(12, *(len(column) + 1 for column in columns))
    print(" " * width, *(f"{column:>{wide}}" for column in columns))
    for name, values in rows:
        cells = [f"{values[column]:>{wide}.2f}" if column in values else f"{'—':>{wide}}" for column in columns]
        print(f"{name:<{width}}", *cells)


def compare(figures, bases_of, title):
    """Prints medians as a table, and the ratios of each way to its bases, with their range.

    Args:
        figures: by way, the readings of each round: figures by name. A way may lack some.
        bases_of: returns the ways that another one is compared with.
        title: what the table is of.
    """
    rows = []
    for name in next(iter(figures.values()))[0]:
        have = {who: [reading[name] for reading in rounds] for who, rounds in figures.items() if name in rounds[0]}
        rows.append((name, {who: statistics.median(readings) for who, readings in have.items()}))
        for who, readings in have.items():
            for base in bases_of(who):
                ratios = [one / other for one, other in zip(readings, have[base], strict=True)]
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"{name}, {who} : {base}: {spread}", file=sys.stderr)
    table(rows, list(figures), title)


def median_and_spread(values):
    return statistics.median(values), min(values), max(values)


def parser(text):
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return made


def save(path, figures):
    if path:
        with open(path, "w") as file:
            json.dump(figures, file, indent=2)
