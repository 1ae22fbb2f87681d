"""What is read from pipes, whose writing ends are this process's own."""

import fcntl
import io
import os
import select
import struct
import termios

import pytest

from tfdist.cli.outputs import KEPT_LINES, Outputs


class Rank:
    """The writing end of one process's output."""

    def __init__(self):
        self.reading, self.writing = os.pipe()

    def write(self, data):
        """In one piece: what was written before has been read."""
        while struct.unpack("i", fcntl.ioctl(self.writing, termios.FIONREAD, b"\0" * 4))[0]:
            select.select([], [self.writing], [], 0.001)
        os.write(self.writing, data)

    def end(self):
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1


@pytest.fixture
def ranks():
    made = []

    def make(count):
        made.extend(Rank() for _ in range(count))
        return made

    yield make
    for rank in made:
        rank.end()


def test_lines_are_shown_with_their_rank(ranks):
    outputs, target = Outputs(), io.BytesIO()
    first, second = ranks(2)
    outputs.show("rank 0", first.reading, target)
    outputs.show("rank 11", second.reading, target)
    outputs.start()
    first.write(b"a\nb\n")
    second.write(b"c\n\n")
    first.end()
    second.end()
    outputs.finish()
    lines = target.getvalue().splitlines()
    assert sorted(lines) == [b"[rank 0] a", b"[rank 0] b", b"[rank 11] ", b"[rank 11] c"]
    assert outputs.kept == {}


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one ", b"line", b"\n"], [b"one line"]),
        ([b"a\r", b"\nb\n"], [b"a", b"b"]),  # one end, cut in two
        ([b"1/2\r", b"2/2\r", b"done\n"], [b"1/2", b"2/2", b"done"]),  # a progress bar
        ([b"a\n\nb"], [b"a", b"", b"b"]),
        ([b"without an end"], [b"without an end"]),
        ([b"ends so\r"], [b"ends so"]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
        ([], []),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_line_ends_are_normalized(ranks, pieces, lines, ends):
    """Also where a child of the process still holds the pipe when all is over."""
    outputs, target = Outputs(), io.BytesIO()
    (rank,) = ranks(1)
    outputs.show("rank 0", rank.reading, target)
    outputs.start()
    for piece in pieces:
        rank.write(piece)
    if ends:
        rank.end()
    outputs.finish()
    assert target.getvalue() == b"".join(b"[rank 0] %b\n" % line for line in lines)


def test_long_line_without_end_is_split(ranks):
    outputs, target = Outputs(), io.BytesIO()
    (rank,) = ranks(1)
    outputs.show("rank 0", rank.reading, target)
    outputs.start()
    for _ in range(40):
        rank.write(b"x" * 4096)
    rank.end()
    outputs.finish()
    lines = target.getvalue().splitlines()
    assert len(lines) == 3
    assert sum(len(line.removeprefix(b"[rank 0] ")) for line in lines) == 40 * 4096


def test_the_last_lines_are_kept(ranks):
    outputs = Outputs()
    first, second = ranks(2)
    outputs.keep("rank 1", first.reading)
    outputs.keep("rank 2", second.reading)
    outputs.start()
    for number in range(KEPT_LINES + 3):
        first.write(b"%d\n" % number)
    first.end()
    second.end()
    outputs.finish()
    assert list(outputs.kept["rank 1"].lines) == [b"%d\n" % number for number in range(3, KEPT_LINES + 3)]
    assert outputs.kept["rank 1"].count == KEPT_LINES + 3
    assert (list(outputs.kept["rank 2"].lines), outputs.kept["rank 2"].count) == ([], 0)


def test_the_log_has_every_byte(ranks, tmp_path):
    """As it was written: line ends too, and no rank."""
    outputs = Outputs(str(tmp_path))
    (rank,) = ranks(1)
    outputs.keep("rank 3", rank.reading)
    outputs.start()
    written = b"1/2\r2/2\r\n\xff no end"
    rank.write(written)
    rank.end()
    outputs.finish()
    assert outputs.log_path("rank 3") == str(tmp_path / "rank-3.log")
    assert (tmp_path / "rank-3.log").read_bytes() == written
    assert list(outputs.kept["rank 3"].lines) == [b"1/2\n", b"2/2\n", b"\xff no end\n"]


def test_the_log_can_be_read_while_the_process_runs(ranks, tmp_path):
    outputs = Outputs(str(tmp_path))
    (rank,) = ranks(1)
    outputs.keep("rank 0", rank.reading)
    outputs.start()
    rank.write(b"first\n")
    rank.write(b"second\n")
    rank.write(b"third\n")  # by then the first has been handed on
    assert (tmp_path / "rank-0.log").read_bytes().startswith(b"first\n")
    rank.end()
    outputs.finish()


class Gone(io.BytesIO):
    def write(self, data):
        raise BrokenPipeError


def test_closed_target_breaks_the_pipe_of_its_process(ranks):
    """Their own next write fails; what goes elsewhere goes on."""
    outputs, target = Outputs(), io.BytesIO()
    unread, read = ranks(2)
    outputs.show("rank 0", unread.reading, Gone())
    outputs.show("rank 1", read.reading, target)
    outputs.start()
    unread.write(b"a\n")
    read.write(b"b\n")
    poll = select.poll()
    poll.register(unread.writing, 0)
    assert poll.poll(10_000)[0][1] & select.POLLERR
    with pytest.raises(BrokenPipeError):
        os.write(unread.writing, b"c\n")
    read.write(b"d\n")
    read.end()
    outputs.finish()
    assert target.getvalue() == b"[rank 1] b\n[rank 1] d\n"


def test_finish_without_start_returns():
    """As when the first process cannot be started."""
    Outputs().finish()
