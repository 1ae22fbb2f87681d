"""`tf.distribute` strategies."""

from __future__ import annotations

import importlib.util

from tfdist.errors import TensorFlowMissingError


def require_tensorflow() -> None:
    """Fails with one clear line where TensorFlow is not installed.

    Raises:
        TensorFlowMissingError: there is none.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise TensorFlowMissingError(
            "tfdist needs TensorFlow, and leaves the choice of the build to you: "
            "`pip install 'tfdist[cpu]'` or `pip install 'tfdist[gpu]'`."
        )
