"""Two hosts on one machine: network namespaces joined by a link, made and removed here. Needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess
import time
import uuid

AVAILABLE = os.geteuid() == 0 and shutil.which("ip") is not None
SETTINGS = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"}
"""What makes MPI treat two processes of one machine as two hosts."""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


def await_carrier(name, deadline=10.0):
    """Until the interface in the namespace of its name can be used."""
    end = time.monotonic() + deadline
    while "state UP" not in ip("-n", name, "link", "show", name):
        assert time.monotonic() < end, f"{name} does not come up"
        time.sleep(0.01)


@contextlib.contextmanager
def two_hosts():
    """Yields the names of two namespaces, whose interfaces have their names, at 10.77.0.1 and 10.77.0.2."""
    tag = uuid.uuid4().hex[:6]
    names = [f"tfd{tag}a", f"tfd{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        for name in names:
            await_carrier(name)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
