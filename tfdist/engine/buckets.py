"""Packing many tensors into few buffers, so that small ones do not each pay for a collective of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BUCKET_BYTES = 16 << 20
"""A bucket is closed when it holds this much."""

ALONE_BYTES = 1 << 20
"""A tensor of at least this size travels alone: it needs no copy then, which costs more than another collective."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel together.

    Attributes:
        members: their positions in the list that was packed.
        dtype: of all of them.
    """

    members: tuple[int, ...]
    dtype: np.dtype


def plan(
    sizes: Sequence[int], dtypes: Sequence[np.dtype], limit: int = BUCKET_BYTES, alone: int = ALONE_BYTES
) -> list[Bucket]:
    """Distributes tensors over buckets, in their order.

    Args:
        sizes: bytes of each tensor.
        dtypes: of each tensor.
        limit: bytes after which a bucket is closed.
        alone: bytes from which on a tensor has a bucket of its own.

    Returns:
        Buckets, in the order in which their last member comes.
    """
    closed: list[Bucket] = []
    open_members: dict[np.dtype, list[int]] = {}
    open_bytes: dict[np.dtype, int] = {}
    for position, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size >= alone:
            closed.append(Bucket((position,), dtype))
            continue
        members = open_members.setdefault(dtype, [])
        members.append(position)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size
        if open_bytes[dtype] >= limit:
            closed.append(Bucket(tuple(open_members.pop(dtype)), dtype))
            del open_bytes[dtype]
    closed += [Bucket(tuple(members), dtype) for dtype, members in open_members.items()]
    return sorted(closed, key=lambda bucket: bucket.members[-1])
