"""A process that has imported TensorFlow and tfdist, and forks one for each program to run; see `forking.py`.

Its standard input is a socket. A line is a request in JSON, and each is answered by a line: a program to run by the
number of its process, the number of a process by its exit code, or null while it runs. It ends with the other side.
"""

import atexit
import gc
import json
import os
import sys
import threading
import types
from pathlib import Path

import keras  # noqa: F401
import numpy as np
import pytest  # noqa: F401
import sklearn.datasets
import tensorflow as tf  # noqa: F401

import tfdist


def request():
    """The next one, or None at the end."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            return None
        line += part
    return json.loads(line)


def serve():
    """Answers requests; returns in each fork, with what it has to run, and at the end, with None."""
    while asked := request():
        if "command" in asked:
            waiting, held = os.pipe()
            answer = os.fork()
            if not answer:
                os.close(waiting)
                become(asked["environment"], asked["output"], asked["folder"])
                os.close(held)
                return asked["command"]
            os.close(held)
            os.read(waiting, 1)  # until it has a session of its own, by which it can be killed
            os.close(waiting)
        else:
            pid, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        os.write(0, json.dumps(answer).encode() + b"\n")
    return None


def become(environment, output, folder):
    """Takes on what a process of its own would have."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(path, flags)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
    # Whole lines: an unbuffered `print` of several values writes each by itself, and notices of threads get between.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    np.random.seed()  # NumPy's own generator would be the same in all forks; Python's is seeded anew by itself


def run(command):
    """Runs a script as the interpreter does: what it leaves to the end of the process comes after it.

    What the interpreter takes apart at the end of a script that has not failed, once it has run exit handlers, is left
    to the system: TensorFlow's modules are an eighth of what a process with a short `fit` costs. Launches by
    `tfdist run` end as they do in life.
    """
    script = command[0]
    sys.argv[:] = command
    sys.path[0] = str(Path(script).parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sklearn.datasets.load_digits()  # what it imports when it is used
    for name in tfdist.__all__:  # likewise; nothing of MPI
        getattr(tfdist, name)
    # Collections of garbage skip what is imported: a third of the time of forks that clear Keras's session often. They
    # would also write to, and so copy, all of the memory that forks share.
    gc.collect()
    gc.freeze()
    if asked_for := serve():
        run(asked_for)
