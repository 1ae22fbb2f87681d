"""A hash of int64 keys, equal on every platform, that says which server holds a key and where an index keeps it."""

from __future__ import annotations

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""


def mix(words: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's output function: a bijection of 64-bit words, in which an input bit changes half the output.

    Args:
        words: words in any shape, int64 or uint64.

    Returns:
        A new array of uint64.

    References:
        Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014.
    """
    mixed = words.astype(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def server_of(keys: np.ndarray, servers: int) -> np.ndarray:
    """Returns the server of each key. It depends only on the key and on the number of servers.

    It uses the upper half of the hash. So the lower bits, which `KeyIndex` uses, are uniform among one server's keys.

    Args:
        keys: keys, int64.
        servers: number of servers, at least 1 and below 2³¹.

    Returns:
        Numbers from 0 to ``servers`` − 1, int64, in the shape of ``keys``.

    Raises:
        ValueError: ``servers`` is out of this range.
    """
    if not 1 <= servers < 1 << 31:
        raise ValueError(f"the number of servers must be from 1 to {(1 << 31) - 1}; got {servers}")
    upper = mix(keys) >> np.uint64(32)
    return ((upper * np.uint64(servers)) >> np.uint64(32)).astype(np.int64)
