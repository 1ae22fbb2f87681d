"""Joins a job, and kills itself (or the rendezvous server) at a chosen point of the start."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np

from tfdist.cluster import connection, discovery
from tfdist.cluster.channel import Channel
from tfdist.cluster.pmi import ProcessManager
from tfdist.cluster.settings import Timeouts
from tfdist.collectives import ring
from tfdist.comm import segments
from tfdist.runtime import world

POINT = os.environ.get("TEST_POINT", "")
if os.environ.get("TEST_POINT_RANK", "") not in ("", str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])):
    POINT = ""


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, act):
    original = getattr(owner, name)

    def method(*args, **kwargs):
        act()
        return original(*args, **kwargs)

    setattr(owner, name, method)


def kill_server():
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    for pid in listing.stdout.split():
        if b"tfdist.cluster.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)


if POINT == "before_handshake":
    before(connection, "_handshake", die)
elif POINT == "after_handshake":
    before(Channel, "_listen", die)
elif POINT == "in_mpi_init":
    before(ProcessManager, "_answer", die)  # MPI_Init has asked its first question
elif POINT == "server_in_mpi_init":
    before(ProcessManager, "_answer", kill_server)
elif POINT == "deaf_in_mpi_init":
    before(ProcessManager, "_answer", threading.Event().wait)  # MPI_Init waits for an answer
elif POINT == "after_mpi_init":
    before(segments, "unlink_own", die)

entered = world.enter(discovery.discover(None), Timeouts.from_environment())
print("ENTERED", entered.rank, flush=True)
entered.engine.run("sum", ring.all_reduce(np.ones(10)))
