import numpy as np
import pytest

from tfdist.compression import DeepGradientCompression, FewerWorkers, Float16, Int8, Schedule, SignSGD, TopK
from tfdist.compression.differences import as_contraction
from tfdist.gossip.encodings import Differences, Plain, suitable_rate


def values(seed, dtype=np.float64):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(4, 300)).astype(dtype), generator.normal(size=3).astype(dtype)]


def bytes_of(parts):
    return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_plain_weights_are_mixed(dtype):
    local, first, second = values(0, dtype), values(1, dtype), values(2, dtype)
    plain = Plain()
    plain.begin(local, [1, 2])
    plain.sent(local)
    plain.received(1, bytes_of(first))
    plain.received(2, bytes_of(second))
    for change, x, y, z in zip(plain.change({1: 0.25, 2: 0.5}), local, first, second, strict=True):
        assert (change.dtype, change.shape) == (x.dtype, x.shape)
        np.testing.assert_allclose(change, 0.25 * (y - x) + 0.5 * (z - x), rtol=0.01 if dtype == np.float16 else 1e-5)
    assert not any(change.any() for change in plain.change({}))


def differences(rank, method, rate=None):
    schedules = [method if isinstance(method, Schedule) else Schedule({0: method}), None]
    return Differences(schedules, rate, rank)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("method", [TopK(0.1), Int8(), SignSGD(), Schedule({0: None, 2: TopK(0.2), 4: Float16()})])
def test_all_have_the_same_copies(method, dtype):
    everyone = [differences(rank, method) for rank in range(3)]
    for rank, encoding in enumerate(everyone):
        encoding.begin([np.zeros((4, 300), dtype), np.zeros(3, dtype)], [other for other in range(3) if other != rank])
    for number in range(6):
        sent = [bytes_of(encoding.sent(values(10 * number + rank, dtype))) for rank, encoding in enumerate(everyone)]
        for rank, encoding in enumerate(everyone):
            for other in range(3):
                if other != rank:
                    encoding.received(other, sent[other])
        for rank in range(3):
            for encoding in everyone[1:]:
                for copy, first in zip(encoding._copies[rank], everyone[0]._copies[rank], strict=True):
                    np.testing.assert_array_equal(copy, first)
    for rank, encoding in enumerate(everyone):  # vectors are sent as they are
        np.testing.assert_allclose(encoding._copies[rank][1], values(50 + rank, dtype)[1], rtol=1e-6)


def test_change_is_rate_times_difference_of_copies():
    local, remote = differences(0, TopK(0.5), rate=0.25), differences(1, TopK(0.5), rate=0.25)
    for encoding, rank in ((local, 0), (remote, 1)):
        encoding.begin([np.zeros((4, 300)), np.zeros(3)], [1 - rank])
    weights, theirs = values(0), values(1)
    local.sent(weights)
    local.received(1, bytes_of(remote.sent(theirs)))
    matrix, vector = local.change({1: 0.5})
    np.testing.assert_allclose(matrix.reshape(-1), 0.125 * (local._copies[1][0] - local._copies[0][0]))
    np.testing.assert_allclose(vector, 0.5 * (theirs[1] - weights[1]), err_msg="what is not compressed has no rate")
    assert np.count_nonzero(local._copies[1][0]) == 600


def test_nan_is_sent_uncompressed():
    local, remote = differences(0, TopK(0.1)), differences(1, TopK(0.1))
    for encoding, rank in ((local, 0), (remote, 1)):
        encoding.begin(values(0), [1 - rank])
    broken = values(1)
    broken[0][2, 5] = np.nan
    local.sent(values(2))
    local.received(1, bytes_of(remote.sent(broken)))
    np.testing.assert_array_equal(local._copies[1][0], broken[0].reshape(-1))


def test_coarse_methods_have_small_rates():
    rates = [suitable_rate(as_contraction(method), (100, 30)) for method in (TopK(0.01), TopK(0.1), TopK(0.5), Int8())]
    assert rates == sorted(rates)
    assert rates[-1] == 1
    assert rates[0] < 0.1


def mixed_for_long(method, size=8, rate=None):
    """The distance from consensus on a ring after 150 rounds, as a part of that before."""
    everyone = [Differences([Schedule({0: method})], rate, rank) for rank in range(size)]
    held = [[np.random.default_rng(rank).normal(size=(20, 50))] for rank in range(size)]
    for rank, encoding in enumerate(everyone):
        encoding.begin([np.zeros((20, 50))], [(rank + step) % size for step in (-1, 1)])

    def apart():
        return np.linalg.norm(np.array(held) - np.mean(held, axis=0))

    before = apart()
    for _ in range(150):
        sent = [bytes_of(encoding.sent(weights)) for encoding, weights in zip(everyone, held, strict=True)]
        for rank, encoding in enumerate(everyone):
            around = [(rank + step) % size for step in (-1, 1)]
            for other in around:
                encoding.received(other, sent[other])
            held[rank] = [held[rank][0] + encoding.change(dict.fromkeys(around, 1 / 3))[0]]
    return apart() / before


@pytest.mark.parametrize("method", [TopK(0.02), TopK(0.1), SignSGD(), Int8()], ids=repr)
def test_suitable_rates_converge(method):
    assert mixed_for_long(method) < 0.5


def test_too_large_rate_diverges():
    assert mixed_for_long(TopK(0.02), rate=1.0) > 2


@pytest.mark.parametrize("method", [DeepGradientCompression(0.01), FewerWorkers(1), SignSGD(scaled=False)], ids=repr)
def test_unsupported_compression_raises(method):
    with pytest.raises(ValueError, match="gossip cannot compress with"):
        differences(0, method)
