"""Two processes that read each other's memory: here one that is forked and one that forks."""

import multiprocessing
import os
import sys
import threading
import types

import numpy as np
import pytest

from tfdist.comm.shared import Arena, Invitation, Neighbour, SharedMemory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def _read(connection):
    invitation, place, nbytes = connection.recv()
    neighbour = Neighbour(Invitation(*invitation))
    view = neighbour.view(place, nbytes)
    connection.send(view.tobytes())
    connection.recv()
    connection.send((view.tobytes(), view.flags.writeable))


def test_another_process_reads_current_and_later_arena_contents():
    arena = Arena()
    first, second = arena.take(10_000), arena.take(3 << 20)
    second[...] = 7
    part = second[4096 : 4096 + 1000]
    place = arena.find(part)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_read, args=(theirs,))
    process.start()
    try:
        ours.send((tuple(arena.invitation()), place, part.nbytes))
        assert ours.poll(60)
        assert ours.recv() == bytes([7]) * 1000
        part[...] = 9
        ours.send("again")
        assert ours.poll(60)
        assert ours.recv() == (bytes([9]) * 1000, False)
    finally:
        process.join(60)
        process.kill()
    assert arena.find(first) is not None


def test_members_sum_in_memory_if_all_have_the_machine_code():
    arena, view = Arena(), np.zeros(3, np.uint8)
    memory = SharedMemory(arena, {1: types.SimpleNamespace(view=lambda place, nbytes: view[:nbytes])}, {0, 1})
    assert memory.is_summed((0, 1))
    assert not memory.is_summed((0, 2))
    lease = arena.take(100)
    assert memory.place(lease) == arena.find(lease)
    assert memory.view(1, memory.place(lease), 2).size == 2


def test_memory_of_elsewhere_is_not_found():
    arena = Arena()
    arena.take(5000)
    assert arena.find(np.zeros(100)) is None


def test_memory_is_used_again_when_its_last_view_is_gone():
    arena = Arena()
    lease = arena.take(1 << 20)
    place = arena.find(lease)
    view = lease[5:10]
    del lease
    assert arena.find(arena.take(1 << 20)) != place
    del view
    assert arena.find(arena.take(1 << 20)) == place


def test_invitation_with_wrong_identity_raises():
    arena = Arena()
    pid, fd, _ = arena.invitation()
    with pytest.raises(OSError, match="another process"):
        Neighbour(Invitation(pid, fd, b"x" * 16))
    with pytest.raises(OSError, match="No such file"):
        Neighbour(Invitation(pid, 10_000, b""))


def test_many_buffers_need_few_file_descriptors():
    arena = Arena()
    before = len(os.listdir("/proc/self/fd"))
    kept = [arena.take(4) for _ in range(3000)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len({arena.find(buffer) for buffer in kept}) == 3000


def test_found_place_is_constant_while_another_thread_allocates():
    arena = Arena()
    mine = arena.take(1 << 20)
    place = arena.find(mine)
    growing = threading.Thread(target=lambda: [arena.take(1 << 29) for _ in range(200)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        growing.start()
        while growing.is_alive():
            assert arena.find(mine) == place
    finally:
        sys.setswitchinterval(interval)
        growing.join()
