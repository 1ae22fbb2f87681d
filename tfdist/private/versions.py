"""The versions of Keras and TensorFlow that tfdist is tested with, and the error for incompatible versions."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.errors import IncompatibleKerasError

TRIED = ("3.10", "3.15")
"""The oldest and the newest minor version of Keras that the tests have run with."""
TRIED_TENSORFLOW = ("2.18", "2.21")
"""The oldest and the newest minor version of TensorFlow that the tests have run with."""


def incompatible(what: str) -> IncompatibleKerasError:
    """Returns the error for an incompatible version of Keras or TensorFlow.

    Args:
        what: the difference, as a phrase for the message.
    """
    return IncompatibleKerasError(
        f"this version of tfdist does not fit Keras {keras.__version__} with TensorFlow {tf.__version__}: {what}. It "
        f"has been tried with Keras {TRIED[0]} to {TRIED[1]} and TensorFlow {TRIED_TENSORFLOW[0]} to "
        f"{TRIED_TENSORFLOW[1]}: install these, such as with `pip install 'keras=={TRIED[1]}.*'`, or a newer tfdist."
    )
