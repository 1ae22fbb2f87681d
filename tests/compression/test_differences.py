import numpy as np
import pytest

from tfdist.compression import (
    DeepGradientCompression,
    ErrorFeedback,
    Int8,
    Schedule,
    SignSGD,
    State,
    TopK,
    WithoutFeedback,
)
from tfdist.compression.differences import advance, as_contraction, base, check


@pytest.mark.parametrize("method", [TopK(0.2), Int8(), SignSGD()], ids=repr)
def test_sender_and_receiver_stay_equal_and_approach_the_values(method):
    method = as_contraction(method)
    state = State("a", shape=(20, 10))
    values = np.random.default_rng(0).normal(size=(20, 10))
    sender, receiver = np.zeros(200), np.zeros(200)
    for _ in range(40):
        payload = advance(method, values, sender, state)
        method.decode(payload, receiver, np.add)
        np.testing.assert_array_equal(sender, receiver)
    assert np.linalg.norm(receiver - values.reshape(-1)) < 0.1 * np.linalg.norm(values)


def test_non_finite_values_change_no_state():
    state, has = State("a", shape=(3,)), np.ones(3)
    assert advance(as_contraction(TopK(0.5)), np.array([1.0, np.inf, 0.0]), has, state) is None
    assert (has.tolist(), state.step) == ([1.0] * 3, 0)


def test_methods_become_contractions():
    assert as_contraction(TopK(0.1)) == ErrorFeedback(TopK(0.1)) == as_contraction(ErrorFeedback(TopK(0.1)))
    with pytest.raises(TypeError, match="takes no error feedback"):
        as_contraction(DeepGradientCompression(0.01))


def test_differences_cannot_do_without_feedback():
    choice = Schedule({0: None, 5: WithoutFeedback(TopK(0.1))})
    with pytest.raises(
        ValueError, match=r"gossip cannot compress with WithoutFeedback.*; pass TopK\(ratio=0\.1\) itself"
    ):
        check(choice, "gossip")


def test_bases_are_copies_that_can_be_encoded():
    array = np.ones((2, 3), np.float16)
    copied = base(array)
    assert (copied.shape, copied.dtype) == ((6,), np.float32)
    array[0, 0] = 5
    assert copied[0] == 1
