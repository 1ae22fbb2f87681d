"""Entropy coding of sets of indices, in about as many bits as their gaps have entropy.

The gaps between the members of a set are split. Their lowest bits, which are nearly uniform if the set is random, are
written unchanged; the rest is encoded by an asymmetric numeral system (`constriction`), whose model is the frequency of
each value in this set. The number of low bits is chosen by the resulting size.

References:
    Duda, Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
    arithmetic coding, 2013.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from constriction import stream  # type: ignore[attr-defined]

from tfdist.errors import PayloadError

_HEADER = struct.Struct("<BIII")


def encode(indices: np.ndarray, total: int) -> np.ndarray:
    """Encodes a set of indices.

    Args:
        indices: ascending and distinct indices, from 0 to ``total`` - 1.
        total: the number of positions.

    Returns:
        Bytes (uint8).
    """
    count = len(indices)
    gaps = np.diff(indices, prepend=-1) - 1
    tables = {bits: _frequencies(gaps >> bits) for bits in {0, _even_bits(count, total)}}
    bits = min(tables, key=lambda bits: count * bits + _size_in_bits(tables[bits][1]))
    values, frequencies, symbols = tables[bits]
    table = _deflated(values, frequencies)
    coder = stream.stack.AnsCoder()
    if len(values) > 1:
        coder.encode_reverse(symbols.astype(np.int32), _model(frequencies))
    low = _pack_bits(gaps & ((1 << bits) - 1), bits)
    head = np.frombuffer(_HEADER.pack(bits, count, len(values), len(table)), np.uint8)
    return np.concatenate([head, table, low, coder.get_compressed().view(np.uint8)])


def decode(data: np.ndarray, total: int) -> np.ndarray:
    """Decodes a set that `encode` wrote.

    Args:
        data: encoded set (uint8).
        total: the number of positions.

    Returns:
        Ascending indices (int64).

    Raises:
        PayloadError: the bytes do not describe such a set.
    """
    try:
        indices = _decode(data)
    except (struct.error, zlib.error, ValueError, AssertionError) as error:
        raise PayloadError(f"coded indices are damaged ({type(error).__name__}: {error})") from None
    if len(indices) and (indices[0] < 0 or indices[-1] >= total):
        raise PayloadError(f"coded indices must be between 0 and {total - 1}; got {indices[0]} to {indices[-1]}")
    return indices


def _decode(data: np.ndarray) -> np.ndarray:
    bits, count, distinct, table_bytes = _HEADER.unpack(data[: _HEADER.size].tobytes())
    low_at = _HEADER.size + table_bytes
    coded_at = low_at + -(-count * bits // 8)
    values, frequencies = _inflated(data[_HEADER.size : low_at], distinct)
    if frequencies.sum() != count:
        raise ValueError(f"the table should have {count} gaps; got {frequencies.sum()}")
    if distinct > 1:
        coder = stream.stack.AnsCoder(np.frombuffer(data[coded_at:].tobytes(), np.uint32))
        high = values[coder.decode(_model(frequencies), count)]
    else:
        high = np.repeat(values, count)
    gaps = (high << bits) | _unpack_bits(data[low_at:coded_at], count, bits)
    return np.cumsum(gaps + 1) - 1


def _even_bits(count: int, total: int) -> int:
    """Returns the number of low bits of the gaps that are nearly uniform if the set is random."""
    return min(31, max(0, int(np.log2(total / count)) - 3)) if count else 0


def _frequencies(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distinct values, ascending; their frequencies; and, for each value, its position among them."""
    if values.size and values.max() < 1 << 16:
        every = np.bincount(values)
        distinct = np.flatnonzero(every)
        places = np.cumsum(every > 0) - 1
        return distinct, every[distinct], places[values]
    distinct, places, frequencies = np.unique(values, return_inverse=True, return_counts=True)
    return distinct, frequencies, places


def _size_in_bits(frequencies: np.ndarray) -> float:
    """Returns the estimated size of the coded values and of their table."""
    if not len(frequencies):
        return 0.0
    return float((frequencies * np.log2(frequencies.sum() / frequencies)).sum()) + 20 * len(frequencies)


def _model(frequencies: np.ndarray) -> Any:
    return stream.model.Categorical((frequencies / frequencies.sum()).astype(np.float32), perfect=False)


def _deflated(values: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    table = np.concatenate([np.diff(values, prepend=0), frequencies]).astype("<u8")
    by_place = np.ascontiguousarray(table.view(np.uint8).reshape(-1, 8).T)
    return np.frombuffer(zlib.compress(by_place.tobytes()), np.uint8)


def _inflated(data: np.ndarray, distinct: int) -> tuple[np.ndarray, np.ndarray]:
    by_place = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8).reshape(8, 2 * distinct)
    table = np.ascontiguousarray(by_place.T).view("<u8").reshape(-1).astype(np.int64)
    return np.cumsum(table[:distinct]), table[distinct:]


def _pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    if not bits:
        return np.empty(0, np.uint8)
    table = values.astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(table, axis=1)[:, 32 - bits :])


def _unpack_bits(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    if not bits:
        return np.zeros(count, np.int64)
    table = np.zeros((count, 32), np.uint8)
    table[:, 32 - bits :] = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    return np.packbits(table, axis=1).view(">u4").reshape(-1).astype(np.int64)
