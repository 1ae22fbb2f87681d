"""Packs many tensors into few buckets, so that small tensors do not each cost a collective."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BUCKET_BYTES = 16 << 20
"""Number of bytes at which a bucket is closed."""

ALONE_BYTES = 1 << 20
"""Bytes from which a tensor gets its own bucket, because copying it would cost more than another collective."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one kind that are reduced together.

    Attributes:
        members: positions of the tensors in the list that was packed.
        kind: common kind of the tensors.
    """

    members: tuple[int, ...]
    kind: Hashable


def plan(
    sizes: Sequence[int], kinds: Sequence[Hashable], limit: int = BUCKET_BYTES, alone: int = ALONE_BYTES
) -> list[Bucket]:
    """Distributes tensors over buckets, in order.

    Args:
        sizes: number of bytes of each tensor.
        kinds: kind of each tensor, which includes its dtype; a bucket holds tensors of one kind.
        limit: bytes at which a bucket is closed.
        alone: bytes from which a tensor gets its own bucket.

    Returns:
        Buckets, ordered by their last members.
    """
    closed: list[Bucket] = []
    open_members: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if size >= alone:
            closed.append(Bucket((position,), kind))
            continue
        members = open_members.setdefault(kind, [])
        members.append(position)
        open_bytes[kind] = open_bytes.get(kind, 0) + size
        if open_bytes[kind] >= limit:
            closed.append(Bucket(tuple(open_members.pop(kind)), kind))
            del open_bytes[kind]
    closed += [Bucket(tuple(members), kind) for kind, members in open_members.items()]
    return sorted(closed, key=lambda bucket: bucket.members[-1])
