"""Jobs with parameter servers: starts them, and collects what every worker reports."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import side_by_side

ALL_REDUCE = "all-reduce"
"""In place of a mode: workers without servers."""

_FOLDER = "TFDIST_BENCHMARK_REPORTS"
"""Environment variable: the folder to which workers write their reports."""


def run(command, workers, servers=1, cores="share", deadline=600):
    """Runs a script as a job, and returns every worker's report, in the order of their ranks.

    Args:
        command: Python script and arguments; each worker calls `report` once.
        workers: number of workers.
        servers: number of parameter servers; 0 for none.
        cores: whether each process gets a share of the cores ("share"), or may use all of them ("all").
        deadline: in seconds; None for none. All processes are ended then.
    """
    launcher = ["--ps", str(servers), "--cores", cores]
    with tempfile.TemporaryDirectory() as folder:
        env = {_FOLDER: folder}
        side_by_side.measure(command, workers, env, way="tfdist", deadline=deadline, launcher=launcher)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]


def rank():
    """This worker's place among the workers."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def meet(workers, deadline=120):
    """Waits until all workers are here; call it once, before training: in some modes they wait for each other there."""
    folder = Path(os.environ[_FOLDER])
    (folder / f"{rank()}.here").touch()
    end = time.monotonic() + deadline
    while len(list(folder.glob("*.here"))) < workers:
        if time.monotonic() > end:
            raise TimeoutError(f"not all {workers} workers came within {deadline} s")
        time.sleep(0.005)


def report(figures):
    """Reports figures; called by every worker."""
    Path(os.environ[_FOLDER], f"{rank()}.json").write_text(json.dumps(figures))
    if rank() == 0:
        side_by_side.report(figures)


@contextlib.contextmanager
def children(commands, deadline=600):
    """Starts Python scripts as processes with text pipes to their standard input and output, and ends them.

    They are also ended when this process is killed, and after the deadline: `line` of them then raises.

    Args:
        commands: script and arguments of each.
        deadline: in seconds.

    Yields:
        The processes.
    """
    from tfdist.cli import resources

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    popens = []

    def end():
        for popen in popens:
            popen.kill()

    timer = threading.Timer(deadline, end)
    try:
        for command in commands:
            arguments = [sys.executable, *command]
            popens.append(subprocess.Popen(arguments, env=environment, preexec_fn=resources.at_start(None), **pipes))
        timer.start()
        yield popens
    finally:
        timer.cancel()
        end()
        for popen in popens:
            popen.communicate()


def line(popen):
    """Returns the next line that a process of `children` prints.

    Raises:
        RuntimeError: the process has ended.
    """
    read = popen.stdout.readline()
    if not read:
        raise RuntimeError(f"{popen.args} exited with code {popen.wait()}")
    return read.strip()


def strategy(mode, policy="Unscaled()"):
    """A strategy, on workers; a parameter server serves here, and ends.

    Args:
        mode: "all-reduce", a mode of parameter servers with its argument, as ``"BoundedStaleness(2)"``, or "Hogwild()".
        policy: for stale gradients, with its argument.
    """
    import tfdist
    from tfdist.parameter_server import Hogwild
    from tfdist.parameter_server.options import staleness, synchronization
    from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

    if mode == ALL_REDUCE:
        return tfdist.AllReduceStrategy()
    if mode == "Hogwild()":
        return ParameterServerStrategy(pushes=Hogwild())
    return ParameterServerStrategy(synchronization=_made(synchronization, mode, late=_made(staleness, policy)))


def _made(module, text, **more):
    name, _, argument = text.rstrip(")").partition("(")
    more = {} if name == "Synchronous" else more
    return getattr(module, name)(*([json.loads(argument)] if argument else []), **more)


def spread(values):
    """A row of a table: median, lowest and highest."""
    return dict(zip(("median", "from", "to"), side_by_side.median_and_spread(values), strict=True))
