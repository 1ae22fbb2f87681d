"""Comparisons of weights: of all processes, and with those of another model."""

import numpy as np
import tensorflow as tf

import tfdist


def assert_alike(model, what="weights"):
    """All processes have the same bits."""
    for place, variable in enumerate(getattr(model, what)):
        everyone = tfdist.all_gather(tf.constant(variable.numpy()[None]))
        assert (everyone.numpy() == everyone.numpy()[0]).all(), f"{what} {place} {variable.path}"


def assert_close(model, expected, rtol=1e-9):
    """The weights of a model, or given ones, are close to those expected."""
    weights = model if isinstance(model, list) else model.get_weights()
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=rtol * np.abs(other).max())
