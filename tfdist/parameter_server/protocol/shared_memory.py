"""Arrays of messages in memory that a worker and a server on one machine share, instead of in frames.

A worker makes a segment, which the server maps. A message whose arrays are in it has two frames: a *locator*, which
says where they are, and the header.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import msgspec

from tfdist.parameter_server.protocol import anonymous_memory
from tfdist.parameter_server.protocol.anonymous_memory import HEAD_BYTES, MemoryLocation
from tfdist.parameter_server.protocol.wire import InvalidMessageError

_MAGIC = b"tfsm"
_ALIGNMENT = 64
LEAST_BYTES = 1 << 16
"""Minimum bytes of a message's arrays in a segment; fewer are as fast in frames."""


class Locator(msgspec.Struct, frozen=True, array_like=True):
    """Where the arrays of a message are.

    Attributes:
        id: ``id`` of a request, for the refusal of a server that has no segment; -1 for an answer.
        slot: slot of the segment.
        sizes: bytes of each array; the arrays follow each other, aligned.
    """

    id: int
    slot: int
    sizes: tuple[int, ...]


_DECODER = msgspec.msgpack.Decoder(Locator)


class Segment:
    """Shared memory with slots, each with an area for the arrays of a request and one for those of its answer.

    Args:
        area: bytes of each area.
        slots: number of slots.
        memory: mapped memory.
    """

    def __init__(self, area: int, slots: int, memory: mmap.mmap) -> None:
        self.area = area
        self.slots = slots
        self._memory = memoryview(memory)[HEAD_BYTES:]

    @classmethod
    def make(cls, area: int, slots: int) -> tuple[Segment, MemoryLocation] | None:
        """Makes a segment, and returns it with its location; None if the machine has no room for it.

        Args:
            area: bytes of each area.
            slots: number of slots.
        """
        try:
            made, where = anonymous_memory.make(_size_of(area, slots), is_reserved=True)
        except (OSError, OverflowError):
            return None
        return cls(area, slots, made), where

    @classmethod
    def open(cls, where: MemoryLocation, area: int, slots: int) -> Segment | None:
        """Maps a segment that another process has made.

        Args:
            where: location that the other process has sent.
            area: bytes of each area.
            slots: number of slots.

        Returns:
            The segment; None if this process cannot open it; see `anonymous_memory.open_memory`.
        """
        memory = anonymous_memory.open_memory(where, _size_of(area, slots)) if min(area, slots) > 0 else None
        return None if memory is None else cls(area, slots, memory)

    def moved(self, slot: int, frames: Sequence[Any], is_answer: bool, number: int = -1) -> list[Any]:
        """Copies the arrays of a message into the segment, unless they are small or do not fit.

        Args:
            slot: slot whose area is free.
            frames: frames of the message: the header, and the arrays.
            is_answer: whether the message is an answer.
            number: ``id`` of a request.

        Returns:
            The frames to send instead; the same ones if nothing was copied.
        """
        arrays = [memoryview(frame).cast("B") if len(frame) else memoryview(b"") for frame in frames[1:]]
        sizes = [len(array) for array in arrays]
        if sum(sizes) < LEAST_BYTES or sum(map(_aligned, sizes)) > self.area:
            return list(frames)
        for place, array in zip(self._places(slot, is_answer, sizes), arrays, strict=True):
            self._memory[place : place + len(array)] = array
        return [_MAGIC + msgspec.msgpack.encode(Locator(number, slot, tuple(sizes))), frames[0]]

    def restored(self, locator: Locator, header: Any, is_answer: bool) -> list[Any]:
        """Returns the frames of a message: the header, and views of the segment.

        Args:
            locator: locator of the message.
            header: other frame of the message.
            is_answer: whether the message is an answer.

        Raises:
            InvalidMessageError: the locator does not fit this segment.
        """
        if not 0 <= locator.slot < self.slots or sum(map(_aligned, locator.sizes)) > self.area:
            raise InvalidMessageError("a locator that belongs to another segment")
        places = self._places(locator.slot, is_answer, locator.sizes)
        views = [self._memory[place : place + size] for place, size in zip(places, locator.sizes, strict=True)]
        return [header, *(view.toreadonly() for view in views)]

    def _places(self, slot: int, is_answer: bool, sizes: Sequence[int]) -> Iterator[int]:
        place = (2 * slot + is_answer) * self.area
        for size in sizes:
            yield place
            place += _aligned(size)


def locator_of(frames: Sequence[Any]) -> Locator | None:
    """Returns the locator of a message; None if its arrays are in frames.

    Args:
        frames: frames as they were received.

    Raises:
        InvalidMessageError: the locator cannot be decoded, or has a negative size.
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
    """Returns the bytes of an area for arrays, which are enough even if each is sent alone.

    Args:
        shapes: shape of each array.
        itemsizes: bytes per element of each array.
    """
    return (
        sum(_aligned(prod(shape) * itemsize) for shape, itemsize in zip(shapes, itemsizes, strict=True)) or _ALIGNMENT
    )


def _size_of(area: int, slots: int) -> int:
    return HEAD_BYTES + 2 * slots * area


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
