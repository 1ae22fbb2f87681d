"""Error feedback loses nothing."""

import numpy as np
import pytest

from tests.compression.methods import BIASED, UNBIASED
from tfdist import compression as c

rng = np.random.default_rng(3)


@pytest.mark.parametrize("method", BIASED + UNBIASED, ids=str)
def test_sent_vectors_and_residual_add_up_to_gradients(method):
    fed_back, state = c.ErrorFeedback(method), c.State(shape=(50, 60))
    gradients, sent = np.zeros(3000), np.zeros(3000)
    for step in range(30):
        state.step = step
        gradient = (1e-3 * rng.standard_normal(3000)).astype(np.float32)
        payload = fed_back.encode(gradient, state)
        gradients += gradient
        sent += fed_back.decode(payload)
    np.testing.assert_allclose(sent + state.arrays["residual"], gradients, atol=1e-6 * np.abs(sent).max() + 1e-7)


@pytest.mark.parametrize("method", [m for m in BIASED + UNBIASED if not isinstance(m, c.Threshold | c.Strom)], ids=str)
def test_the_residual_does_not_grow_without_bound(method):
    fed_back, state = c.ErrorFeedback(method), c.State(shape=(50, 60))
    norms = []
    for step in range(200):
        state.step = step
        fed_back.encode((1e-3 * rng.standard_normal(3000)).astype(np.float32), state)
        norms.append(float(np.linalg.norm(state.arrays["residual"])))
    assert max(norms[100:]) < 2.5 * max(norms[:100])


def test_only_plain_methods_can_be_wrapped():
    assert c.ErrorFeedback(c.TopK()) == c.ErrorFeedback(c.TopK())
    assert repr(c.WithoutFeedback(c.TopK(0.5))) == "WithoutFeedback(TopK(ratio=0.5))"
    with pytest.raises(TypeError, match="takes no error feedback"):
        c.ErrorFeedback(c.DeepGradientCompression())
    with pytest.raises(TypeError, match="plain method"):
        c.ErrorFeedback(c.ErrorFeedback(c.TopK()))
    with pytest.raises(TypeError, match="a compression method; got 3"):
        c.WithoutFeedback(3)
