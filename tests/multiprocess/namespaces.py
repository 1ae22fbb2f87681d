"""Several hosts on one machine: network namespaces on a switch, made and removed here. Needs root and iproute2."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

AVAILABLE = os.geteuid() == 0 and shutil.which("ip") is not None
SETTINGS = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"}
"""What makes MPI treat every process of one machine as a host of its own."""


def ip(*arguments):
    return _run("ip", *arguments)


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def await_carrier(name, deadline=10.0):
    """Until the interface in the namespace of its name can be used."""
    end = time.monotonic() + deadline
    while "state UP" not in ip("-n", name, "link", "show", name):
        assert time.monotonic() < end, f"{name} does not come up"
        time.sleep(0.01)


@contextlib.contextmanager
def hosts(count=2, rate=None):
    """Yields the names of namespaces, whose interfaces have their names, at 10.77.0.1, 10.77.0.2, …

    ``rate`` (``"1gbit"``) limits each of their lines, in both directions.
    """
    tag = uuid.uuid4().hex[:6]
    switch = f"tfd{tag}s"
    names = [f"tfd{tag}{index}" for index in range(count)]
    terminated = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without cleaning up
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", name, "netns", name, "type", "veth", "peer", "name", name, "netns", switch)
            ip("-n", switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
            for side in (name, switch) if rate else ():
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                _run("ip", "netns", "exec", side, "tc", "qdisc", "replace", "dev", name, "root", *limit)
        for name in names:
            await_carrier(name)
        yield names
    finally:
        signal.signal(signal.SIGTERM, terminated)
        for name in (*names, switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
