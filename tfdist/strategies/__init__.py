"""`tf.distribute` strategies."""

from __future__ import annotations

import importlib.util

from tfdist.errors import TensorFlowMissingError

HOW_TO_INSTALL = "`pip install tensorflow-cpu`, or with NVIDIA GPUs `pip install 'tensorflow[and-cuda]'`"


def require_tensorflow() -> None:
    """Fails with one clear line where TensorFlow is not installed.

    Raises:
        TensorFlowMissingError: there is none.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise TensorFlowMissingError(
            f"tfdist needs TensorFlow, and leaves the choice of the build to you: {HOW_TO_INSTALL}."
        )
