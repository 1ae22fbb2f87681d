"""The hash of keys against published values, and how keys are dealt over servers."""

import numpy as np
import pytest

from tfdist.parameter_server.options.key_hash import GAMMA, mix, server_of

EXTREMES = np.array([np.iinfo(np.int64).min, -1, 0, 1, np.iinfo(np.int64).max])


def test_mixing_equals_splitmix64():
    """The first outputs of the generator with seed 0."""
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(GAMMA)
    assert [hex(word) for word in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_mixing_does_not_change_its_argument():
    keys = np.arange(5)
    mix(keys)
    np.testing.assert_array_equal(keys, np.arange(5))


def test_an_input_bit_changes_half_of_the_output():
    words = np.random.default_rng(0).integers(0, 1 << 62, 2000)
    for bit in (0, 17, 40, 61):
        changed = mix(words) ^ mix(words ^ (1 << bit))
        assert np.bitwise_count(changed).mean() == pytest.approx(32, abs=0.5)


def test_servers_of_keys_never_change():
    """They are part of the format of snapshots."""
    keys = np.array([*EXTREMES, 123456789])
    assert server_of(keys, 3).tolist() == [0, 2, 0, 1, 1, 2]
    assert server_of(keys, 1000).tolist() == [147, 706, 0, 338, 353, 945]
    assert server_of(keys.reshape(2, 3), 3).shape == (2, 3)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("step", [1, 8, 1 << 32])
def test_keys_are_dealt_evenly_whatever_their_pattern(servers, step):
    number = 1000 * servers
    keys = (np.arange(number) - number // 2) * step
    counts = np.bincount(server_of(keys, servers), minlength=servers)
    assert len(counts) == servers
    assert counts.min() > 850
    assert counts.max() < 1150


def test_zero_servers_raise():
    with pytest.raises(ValueError, match="number of servers must be from 1"):
        server_of(EXTREMES, 0)
