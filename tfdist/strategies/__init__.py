"""The `tf.distribute` strategies, and the check that TensorFlow is installed."""

from __future__ import annotations

import importlib.util

from tfdist.errors import TensorFlowMissingError

HOW_TO_INSTALL = "`pip install tensorflow-cpu`, or with NVIDIA GPUs `pip install 'tensorflow[and-cuda]'`"


def require_tensorflow() -> None:
    """Raises an error if TensorFlow is not installed.

    Raises:
        TensorFlowMissingError: TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise TensorFlowMissingError(
            f"tfdist needs TensorFlow, which is not installed. Choose a build: {HOW_TO_INSTALL}."
        )
