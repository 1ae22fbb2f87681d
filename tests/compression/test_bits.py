import numpy as np
import pytest

from tfdist.compression.bits import pack_levels, unpack_levels

BITS = [8, 4, 2]


def every_level(bits):
    largest = (1 << (bits - 1)) - 1
    return np.arange(-largest, largest + 1, dtype=np.int8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 255, 1001])
def test_levels_come_back(bits, count):
    levels = np.random.default_rng(count).choice(every_level(bits), count)
    packed = pack_levels(levels, bits)
    assert packed.dtype == np.uint8
    assert packed.size == -(-count * bits // 8)
    unpacked = unpack_levels(packed, count, bits)
    assert unpacked.dtype == np.int8
    np.testing.assert_array_equal(unpacked, levels)


@pytest.mark.parametrize("bits", BITS)
def test_every_level_in_every_place(bits):
    per_byte = 8 // bits
    for place in range(per_byte):
        levels = np.zeros(every_level(bits).size * per_byte, np.int8)
        levels[place::per_byte] = every_level(bits)
        np.testing.assert_array_equal(unpack_levels(pack_levels(levels, bits), levels.size, bits), levels)


def test_the_first_number_is_in_the_lowest_bits():
    """The layout is part of the payload format, which other processes and versions read."""
    assert pack_levels(np.array([-7, 7], np.int8), 4).tolist() == [0xF1]
    assert pack_levels(np.array([1, 0, -1, 1, -1], np.int8), 2).tolist() == [0b11_01_10_11, 0b01]
    assert pack_levels(np.array([-1, 127], np.int8), 8).tolist() == [0xFF, 0x7F]


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_only_read(bits):
    levels = every_level(bits)
    levels.flags.writeable = False
    packed = pack_levels(levels, bits)
    packed.flags.writeable = False
    np.testing.assert_array_equal(unpack_levels(packed, levels.size, bits), levels)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_beyond_the_count_are_passed_over(bits):
    packed = np.append(pack_levels(every_level(bits), bits), np.uint8(0xAA))
    np.testing.assert_array_equal(unpack_levels(packed, every_level(bits).size, bits), every_level(bits))
