"""Arrays of messages in memory that a worker and a server on one machine share, instead of in frames.

A worker makes a segment, a file in /dev/shm that only its user can open, and tells the server its random name. When the
server has mapped it, the name is removed: nothing is left behind by processes that are killed. A message whose arrays
are in the segment has two frames: a *locator*, which says where they are, and the header.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import msgspec

from tfdist.parameter_server.wire import InvalidMessageError

_FOLDER = "/dev/shm"
_NAME = re.compile("tfdist_ps_[0-9a-f]{32}")
_MAGIC = b"tfsm"
_ALIGNMENT = 64
LEAST_BYTES = 1 << 18
"""Less than that is as fast in frames."""


class Locator(msgspec.Struct, frozen=True, array_like=True):
    """Where the arrays of a message are.

    Attributes:
        id: of a request, for a server that has no segment; -1 of an answer.
        slot: of the segment.
        sizes: bytes of each array, which follow each other, aligned.
    """

    id: int
    slot: int
    sizes: tuple[int, ...]


_DECODER = msgspec.msgpack.Decoder(Locator)


class Segment:
    """A segment: slots, each with an area for the arrays of a request and one for those of its answer.

    Args:
        name: of its file.
        area: bytes of an area.
        slots: how many there are.
        memory: that is mapped.
    """

    def __init__(self, name: str, area: int, slots: int, memory: mmap.mmap) -> None:
        self.name = name
        self.area = area
        self.slots = slots
        self._memory = memoryview(memory)

    @classmethod
    def make(cls, area: int, slots: int) -> Segment | None:
        """Makes a segment; None where the machine has no room for it.

        Args:
            area: bytes of an area.
            slots: how many there are.
        """
        name = f"tfdist_ps_{secrets.token_hex(16)}"
        try:
            opened = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            os.posix_fallocate(opened, 0, 2 * slots * area)  # a page that cannot be had later would be a SIGBUS
            return cls(name, area, slots, mmap.mmap(opened, 2 * slots * area))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(f"{_FOLDER}/{name}")
            return None
        finally:
            os.close(opened)

    @classmethod
    def open(cls, name: str, area: int, slots: int) -> Segment:
        """Maps a segment that another process of this user on this machine has made.

        Raises:
            ValueError: there is no such segment.
        """
        if not _NAME.fullmatch(name) or area < 1 or slots < 1:
            raise ValueError("no name or size of a segment")
        try:
            opened = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"the segment cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(opened)
            if status.st_uid != os.getuid() or status.st_size != 2 * slots * area:
                raise ValueError("the segment is another user's, or has another size")
            return cls(name, area, slots, mmap.mmap(opened, 2 * slots * area))
        except (OSError, OverflowError) as error:
            raise ValueError(f"the segment cannot be mapped: {error}") from None
        finally:
            os.close(opened)

    def remove_name(self) -> None:
        """Removes the file's name; the memory stays as long as a process has it mapped."""
        with contextlib.suppress(OSError):
            os.unlink(f"{_FOLDER}/{self.name}")

    def moved(self, slot: int, frames: Sequence[Any], is_answer: bool, number: int = -1) -> list[Any]:
        """The frames of a message whose arrays are in the segment; those given where they are small or do not fit.

        Args:
            slot: whose area is free.
            frames: of the message: the header, and the arrays.
            is_answer: whether it is an answer.
            number: the ``id`` of a request.
        """
        arrays = [memoryview(frame).cast("B") if len(frame) else memoryview(b"") for frame in frames[1:]]
        sizes = [len(array) for array in arrays]
        if sum(sizes) < LEAST_BYTES or sum(map(_aligned, sizes)) > self.area:
            return list(frames)
        for place, array in zip(self._places(slot, is_answer, sizes), arrays, strict=True):
            self._memory[place : place + len(array)] = array
        return [_MAGIC + msgspec.msgpack.encode(Locator(number, slot, tuple(sizes))), frames[0]]

    def restored(self, locator: Locator, header: Any, is_answer: bool) -> list[Any]:
        """The frames of a message: the header, and views of the segment.

        Args:
            locator: of the message.
            header: the other frame.
            is_answer: whether it is an answer.

        Raises:
            InvalidMessageError: the locator is of another segment.
        """
        if not 0 <= locator.slot < self.slots or sum(map(_aligned, locator.sizes)) > self.area:
            raise InvalidMessageError("a locator that is of another segment")
        places = self._places(locator.slot, is_answer, locator.sizes)
        views = [self._memory[place : place + size] for place, size in zip(places, locator.sizes, strict=True)]
        return [header, *(view.toreadonly() for view in views)]

    def _places(self, slot: int, is_answer: bool, sizes: Sequence[int]) -> Iterator[int]:
        place = (2 * slot + is_answer) * self.area
        for size in sizes:
            yield place
            place += _aligned(size)


def located(frames: Sequence[Any]) -> Locator | None:
    """The locator of a message; None if it has its arrays in frames.

    Args:
        frames: as they came.

    Raises:
        InvalidMessageError: it does not decode.
    """
    if len(frames) != 2 or bytes(frames[0][: len(_MAGIC)]) != _MAGIC:
        return None
    try:
        locator = _DECODER.decode(bytes(frames[0][len(_MAGIC) :]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessageError(f"the locator cannot be decoded: {error}") from None
    if min(locator.sizes, default=0) < 0:
        raise InvalidMessageError("a locator with a negative size")
    return locator


def area_of(shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int]) -> int:
    """Bytes of an area for arrays, also if each is sent alone.

    Args:
        shapes: of the arrays.
        itemsizes: bytes of an element of each.
    """
    return (
        sum(_aligned(prod(shape) * itemsize) for shape, itemsize in zip(shapes, itemsizes, strict=True)) or _ALIGNMENT
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
