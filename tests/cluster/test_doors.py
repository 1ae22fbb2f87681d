import asyncio
import resource
import socket

import pytest

from tfdist.cluster import doors
from tfdist.cluster.doors import Doors

MANY = 1 << 30
"""Tasks, of whose connections so many are to be kept free that as few strangers as possible may wait."""


@pytest.fixture(autouse=True)
def limits():
    """The doors raise how many files this process may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def admit(reader, writer):
    """Whoever says a name comes in."""
    name = (await reader.readline()).decode().strip()
    if not name:
        return None
    writer.write(b"welcome\n")
    return name


class House:
    """Doors, and who was served behind them."""

    def __init__(self, admit=admit, tasks=4, line_bytes=100):
        self.served, self.ended = [], []
        self.doors = Doors(admit, self._serve, tasks, line_bytes)
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
            opened = asyncio.create_task(self.doors.open(self.listener))
            try:
                async with asyncio.timeout(20):
                    await visit()
            finally:
                opened.cancel()
                self.doors.close()
                self.listener.close()

        asyncio.run(run())


async def is_closed(reader):
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_who_proves_itself_is_served_until_it_goes():
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
def test_who_does_not_is_not_answered(said):
    """Nothing, or a line that is longer than a stranger's may be."""
    house = House()

    async def visit():
        reader, _ = await house.knock(said)
        assert await is_closed(reader)

    house.run(visit)
    assert house.served == []


def test_what_goes_wrong_with_a_stranger_is_the_strangers_matter():
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


def test_a_silent_stranger_is_sent_away(monkeypatch):
    monkeypatch.setattr(doors, "_HANDSHAKE_SECONDS", 0.05)
    house = House()

    async def visit():
        silent, _ = await house.knock()
        task, _ = await house.knock(b"a\n")
        assert await task.readline() == b"welcome\n"
        assert await is_closed(silent)
        assert house.ended == [], "who was let in has all the time"

    house.run(visit)


def test_the_stranger_who_has_waited_longest_gives_way():
    house = House(tasks=MANY)

    async def visit():
        strangers = [await house.knock() for _ in range(doors._FEWEST_STRANGERS)]
        while len(house.doors._strangers) < len(strangers):
            await asyncio.sleep(0)
        task, _ = await house.knock(b"a\n")
        assert await task.readline() == b"welcome\n"
        assert await is_closed(strangers[0][0])
        last_reader, last_writer = strangers[-1]
        last_writer.write(b"b\n")
        assert await last_reader.readline() == b"welcome\n"

    house.run(visit)
    assert sorted(house.served) == ["a", "b"]


def test_who_was_let_in_is_no_stranger():
    """As many tasks as there may be strangers, and one more."""
    house = House(tasks=MANY)

    async def visit():
        for number in range(doors._FEWEST_STRANGERS + 1):
            reader, _ = await house.knock(b"%d\n" % number)
            assert await reader.readline() == b"welcome\n"
        assert len(house.doors._strangers) <= 1  # the last one is on its way in

    house.run(visit)
    assert house.served == [str(number) for number in range(doors._FEWEST_STRANGERS + 1)]
    assert len(house.ended) == len(house.served)


def test_closed_doors_end_all_sessions():
    house = House()

    async def visit():
        silent, _ = await house.knock()
        task, _ = await house.knock(b"a\n")
        await task.readline()
        while not house.served:
            await asyncio.sleep(0)
        house.doors.close()
        assert await is_closed(silent)
        while not house.ended:
            await asyncio.sleep(0)

    house.run(visit)


def test_files_are_kept_free_for_the_tasks():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert Doors(admit, None, 0, 100)._most <= doors._MOST_STRANGERS
    assert Doors(admit, None, MANY, 100)._most == doors._FEWEST_STRANGERS
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), "as many as this process may allow itself"
