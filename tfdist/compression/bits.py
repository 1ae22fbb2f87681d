"""Packing of numbers that need fewer than eight bits."""

from __future__ import annotations

import numpy as np


def pack_levels(levels: np.ndarray, bits: int) -> np.ndarray:
    """Packs small signed integers.

    Args:
        levels: int8, between ``-2**(bits - 1) + 1`` and ``2**(bits - 1) - 1``.
        bits: 8, 4 or 2.

    Returns:
        Bytes; the first integer is in the lowest bits of the first byte.
    """
    if bits == 8:
        return levels.view(np.uint8)
    per_byte = 8 // bits
    offset = 1 << (bits - 1)
    padded = np.zeros(-(-levels.size // per_byte) * per_byte, np.uint8)
    np.add(levels, offset, out=padded[: levels.size].view(np.int8))
    packed = padded[::per_byte].copy()
    for place in range(1, per_byte):
        packed |= padded[place::per_byte] << (place * bits)
    return packed


def unpack_levels(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Unpacks the integers that `pack_levels` packed.

    Args:
        packed: packed integers (uint8).
        count: the number of integers.
        bits: 8, 4 or 2.
    """
    if bits == 8:
        return packed[:count].view(np.int8)
    per_byte = 8 // bits
    byte = np.arange(256, dtype=np.uint8)[:, np.newaxis]
    fields = (byte >> (np.arange(per_byte, dtype=np.uint8) * bits)) & ((1 << bits) - 1)
    table = fields.astype(np.int8) - np.int8(1 << (bits - 1))
    return np.take(table, packed, axis=0).reshape(-1)[:count]
