"""Memory that another process maps, and what is none of it."""

import contextlib
import os
import subprocess
import sys

import msgspec
import pytest

from tfdist.parameter_server.protocol import anonymous_memory
from tfdist.parameter_server.protocol.anonymous_memory import HEAD_BYTES

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
SIZE = 1 << 16
OTHER = f"""
import sys
from tfdist.parameter_server.protocol import anonymous_memory
process, opened, token = sys.argv[1:]
where = anonymous_memory.MemoryLocation(int(process), int(opened), bytes.fromhex(token))
found = anonymous_memory.open_memory(where, {SIZE})
found[{HEAD_BYTES}] = 7
"""


@pytest.fixture(params=[False, True], ids=["as it is used", "reserved"])
def made(request):
    memory, where = anonymous_memory.make(SIZE, request.param)
    yield memory, where
    where.close()


def test_another_process_maps_it(made):
    memory, where = made
    given = [str(where.process), str(where.opened), where.token.hex()]
    subprocess.run([sys.executable, "-c", OTHER, *given], check=True, timeout=60)
    assert memory[HEAD_BYTES] == 7
    assert not any(memory[HEAD_BYTES + 1 :])


@pytest.mark.parametrize("field", ["token", "size", "process", "file", "anything"])
def test_other_memory_or_files_are_not_mapped(made, field, tmp_path):
    _, where = made
    with open(tmp_path / "file", "wb+") as other:
        other.write(where.token)
        other.truncate(SIZE)
        wrong = {
            "token": {"token": b"0" * len(where.token)},
            "process": {"process": 1 << 30},
            "file": {"opened": other.fileno()},
            "anything": {"process": -(1 << 62), "opened": -1, "token": b""},
        }
        altered = msgspec.structs.replace(where, **wrong.get(field, {}))
        assert anonymous_memory.open_memory(altered, SIZE + (field == "size")) is None
    assert anonymous_memory.open_memory(where, SIZE) is not None


def test_too_large_memory_raises_and_leaks_no_descriptor():
    before = held()
    with pytest.raises(OSError, match=r"space|memory|large"):
        anonymous_memory.make(1 << 60, is_reserved=True)
    assert held() == before


def held():
    """Memory without a name that this process has open."""
    links = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            links.add(os.readlink(entry.path))
    return {link for link in links if link.startswith(anonymous_memory._LINKS)}
