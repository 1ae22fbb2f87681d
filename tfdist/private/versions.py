"""The versions of Keras and TensorFlow that tfdist was tried with, and the error for those that it does not fit."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.errors import IncompatibleKerasError

TRIED = ("3.10", "3.15")
"""The oldest and the newest minor version of Keras that the tests have run with."""
TRIED_TENSORFLOW = ("2.18", "2.21")
"""Likewise of TensorFlow."""


def incompatible(what: str) -> IncompatibleKerasError:
    """The error for a Keras or a TensorFlow that tfdist does not fit.

    Args:
        what: is different in it.
    """
    return IncompatibleKerasError(
        f"this version of tfdist does not fit Keras {keras.__version__} with TensorFlow {tf.__version__}: {what}. It "
        f"has been tried with Keras {TRIED[0]} to {TRIED[1]} and TensorFlow {TRIED_TENSORFLOW[0]} to "
        f"{TRIED_TENSORFLOW[1]}: install these, as by `pip install 'keras=={TRIED[1]}.*'`, or a newer tfdist."
    )
