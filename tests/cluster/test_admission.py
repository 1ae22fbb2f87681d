import asyncio
import resource
import socket

import pytest

from tfdist.cluster import admission
from tfdist.cluster.admission import Admission

MANY = 1 << 30
"""So many tasks that as few other connections as possible may wait."""


@pytest.fixture(autouse=True)
def limits():
    """An admission raises how many files this process may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def admit(reader, writer):
    """Admits a connection that sends a name."""
    name = (await reader.readline()).decode().strip()
    if not name:
        return None
    writer.write(b"welcome\n")
    return name


class House:
    """An admission, and the tasks that it served."""

    def __init__(self, admit=admit, tasks=4, line_bytes=100):
        self.served, self.ended = [], []
        self.admission = Admission(admit, self._serve, tasks, line_bytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)

    async def _serve(self, name, reader):
        self.served.append(name)
        try:
            await reader.read()
        finally:
            self.ended.append(name)

    async def knock(self, *lines):
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.writelines(lines)
        return reader, writer

    def run(self, visit):
        async def run():
            opened = asyncio.create_task(self.admission.open(self.listener))
            try:
                async with asyncio.timeout(20):
                    await visit()
            finally:
                opened.cancel()
                self.admission.close()
                self.listener.close()

        asyncio.run(run())


async def is_closed(reader):
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_admitted_task_is_served_until_it_disconnects():
    house = House()

    async def visit():
        first, second = await house.knock(b"a\n"), await house.knock(b"b\n")
        for reader, _ in (first, second):
            assert await reader.readline() == b"welcome\n"
        while len(house.served) < 2:
            await asyncio.sleep(0)
        first[1].close()
        while not house.ended:
            await asyncio.sleep(0)
        assert house.ended == ["a"]

    house.run(visit)
    assert sorted(house.served) == ["a", "b"]


@pytest.mark.parametrize("said", [b"\n", b"x" * 1000, b"x" * 1000 + b"\n"])
def test_connection_without_valid_handshake_is_closed(said):
    """Nothing, or a line that is longer than is read before the handshake's end."""
    house = House()

    async def visit():
        reader, _ = await house.knock(said)
        assert await is_closed(reader)

    house.run(visit)
    assert house.served == []


def test_an_error_in_a_handshake_ends_only_that_connection():
    async def fails(reader, writer):
        if (await reader.readline()) == b"bad\n":
            raise KeyError("no JSON")
        return "good"

    house = House(fails)

    async def visit():
        reader, _ = await house.knock(b"bad\n")
        assert await is_closed(reader)
        await house.knock(b"good\n")
        while house.served != ["good"]:
            await asyncio.sleep(0)

    house.run(visit)


def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(admission, "_HANDSHAKE_SECONDS", 0.05)
    house = House()

    async def visit():
        silent, _ = await house.knock()
        task, _ = await house.knock(b"a\n")
        assert await task.readline() == b"welcome\n"
        assert await is_closed(silent)
        assert house.ended == [], "an admitted task has no deadline"

    house.run(visit)


def test_oldest_unproven_connection_is_closed_at_the_limit():
    house = House(tasks=MANY)

    async def visit():
        unproven = [await house.knock() for _ in range(admission._FEWEST_UNPROVEN)]
        while len(house.admission._unproven) < len(unproven):
            await asyncio.sleep(0)
        task, _ = await house.knock(b"a\n")
        assert await task.readline() == b"welcome\n"
        assert await is_closed(unproven[0][0])
        last_reader, last_writer = unproven[-1]
        last_writer.write(b"b\n")
        assert await last_reader.readline() == b"welcome\n"

    house.run(visit)
    assert sorted(house.served) == ["a", "b"]


def test_an_admitted_task_does_not_count():
    """As many tasks as there may be unproven connections, and one more."""
    house = House(tasks=MANY)

    async def visit():
        for number in range(admission._FEWEST_UNPROVEN + 1):
            reader, _ = await house.knock(b"%d\n" % number)
            assert await reader.readline() == b"welcome\n"
        assert len(house.admission._unproven) <= 1  # the last one is on its way in

    house.run(visit)
    assert house.served == [str(number) for number in range(admission._FEWEST_UNPROVEN + 1)]
    assert len(house.ended) == len(house.served)


def test_closing_ends_all_sessions():
    house = House()

    async def visit():
        silent, _ = await house.knock()
        task, _ = await house.knock(b"a\n")
        await task.readline()
        while not house.served:
            await asyncio.sleep(0)
        house.admission.close()
        assert await is_closed(silent)
        while not house.ended:
            await asyncio.sleep(0)

    house.run(visit)


def test_files_are_kept_free_for_the_tasks():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert Admission(admit, None, 0, 100)._most <= admission._MOST_UNPROVEN
    assert Admission(admit, None, MANY, 100)._most == admission._FEWEST_UNPROVEN
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), "as many as this process may allow itself"
