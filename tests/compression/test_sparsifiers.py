import itertools

import numpy as np
import pytest

from tfdist import compression as c
from tfdist.compression import sparsifiers

rng = np.random.default_rng(1)


def test_threshold_sends_what_reaches_it():
    vector = np.array([0.5, -1.0, 0.99, 2.0], np.float32)
    np.testing.assert_array_equal(c.Threshold(1.0).decode(c.Threshold(1.0).encode(vector)), [0, -1, 0, 2])


def test_random_k_sends_one_of_each_stretch():
    vector = np.ones(1003, np.float32)
    decoded = c.RandomK(0.1).decode(c.RandomK(0.1).encode(vector, c.State("x", 0, 4)))
    assert np.count_nonzero(decoded) == 100
    assert decoded.sum() == 1003
    again = c.RandomK(0.1).decode(c.RandomK(0.1).encode(vector, c.State("x", 3, 4)))
    np.testing.assert_array_equal(again, decoded)  # on another rank


def test_deep_gradient_compression_is_the_papers_recursion():
    method = c.DeepGradientCompression(ratio=0.25, momentum=0.5)
    state, velocity, unsent = c.State(), np.zeros(8), np.zeros(8)
    for _ in range(5):
        gradient = rng.standard_normal(8).astype(np.float32)
        velocity = 0.5 * velocity + gradient
        unsent = unsent + velocity
        chosen = np.argsort(-np.abs(unsent))[:2]
        expected = np.zeros(8)
        expected[chosen] = unsent[chosen]
        velocity[chosen] = unsent[chosen] = 0
        np.testing.assert_allclose(method.decode(method.encode(gradient, state)), expected, rtol=1e-5)


def test_deep_gradient_compression_warms_up_and_clips():
    method = c.DeepGradientCompression(ratio=0.001, warmup_steps=10)
    assert [method.ratio_at(step) for step in (0, 9, 10, 20, 30, 40, 1000)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001,
    ]  # fmt: skip
    clipping = c.DeepGradientCompression(ratio=1.0, momentum=0.0, clip_norm=1.0)
    decoded = clipping.decode(clipping.encode(np.array([30.0, 40.0], np.float32), c.State(size=4)))
    np.testing.assert_allclose(decoded, [0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "elements", "count"),
    [(0.01, 1000, 10), (0.01, 3, 1), (1.0, 5, 5), (0.5, 1, 1), (1e-9, 7, 1), (0.5, 0, 0)],
)
def test_wanted_count_is_the_ratio_but_at_least_one(ratio, elements, count):
    """At least one, of a vector that has any."""
    assert sparsifiers.wanted(ratio, elements) == count


def test_top_k_sends_the_largest_exactly():
    vector = rng.permutation(np.arange(-50, 50)).astype(np.float32) / 7
    decoded = c.TopK(0.1).decode(c.TopK(0.1).encode(vector))
    chosen = np.argsort(-np.abs(vector), kind="stable")[:9]  # -50, then pairs, of which the last is torn apart
    np.testing.assert_array_equal(decoded[chosen], vector[chosen])
    assert np.count_nonzero(decoded) == 10


def test_threshold_may_send_nothing():
    vector = np.full(5, 0.5, np.float32)
    np.testing.assert_array_equal(c.Threshold(1.0).decode(c.Threshold(1.0).encode(vector)), 0)


@pytest.mark.parametrize("elements", [1, 10, 1003])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0])
def test_random_k_scales_one_element_by_its_stretch_length(ratio, elements):
    """Also where stretches are not of one length."""
    count = sparsifiers.wanted(ratio, elements)
    vector = np.arange(1.0, elements + 1)
    bounds = np.arange(count + 1) * elements // count
    method, state, draws = c.RandomK(ratio), c.State(), set()
    for state.step in range(5):
        decoded = method.decode(method.encode(vector, state))
        for begin, end in itertools.pairwise(bounds):
            (place,) = np.flatnonzero(decoded[begin:end])
            assert decoded[begin + place] == vector[begin + place] * (end - begin)
        draws.add(decoded.tobytes())
    assert (len(draws) > 1) == (count < elements)


def test_random_ks_payload_has_no_indices():
    payloads = [c.RandomK(0.1).encode(np.ones(elements, np.float32)).size for elements in (1000, 2000)]
    assert payloads[1] - payloads[0] == 4 * 100
    assert payloads[0] == c.RandomK(0.1).payload_bytes(1000)


def test_random_k_saturates_what_is_beyond_the_range():
    vector = np.full(100, 3e38, np.float32)
    decoded = c.RandomK(0.1).decode(c.RandomK(0.1).encode(vector))
    assert decoded.max() == np.finfo(np.float32).max


def test_dgc_clears_residual_and_velocity_of_sent_elements():
    """Neither as residual nor, by factor masking, as velocity."""
    method, state = c.DeepGradientCompression(ratio=0.5, momentum=0.9), c.State()
    method.encode(np.array([1.0, 5.0, -7.0, 0.5], np.float32), state)
    for name in ("residual", "velocity"):
        np.testing.assert_array_equal(state.arrays[name], [1, 0, 0, 0.5])


def test_a_warm_up_counts_from_the_first_step_of_the_method():
    """A schedule may begin with another one."""
    method, state = c.DeepGradientCompression(ratio=0.001, momentum=0.0, warmup_steps=1), c.State()
    sent = []
    for state.step in range(40, 43):
        decoded = method.decode(method.encode(rng.standard_normal(1024).astype(np.float32), state))
        sent.append(np.count_nonzero(decoded))
    assert sent == [256, 64, 16]
