"""Features that a split layer leaves in parts: each process has some features, of the rows of all along the axis.

A layer that looks at several features, or has weights, would compute something else on these than on whole rows, and so
would a loss. Keras's own layers that do so are refused where the features come to them from layer to layer. What other
layers compute with them is up to their authors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import layer, symbolic_scope, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace

OF_ALL_FEATURES = frozenset(("softmax", "log_softmax", "sparsemax", "glu"))
"""Keras's activations that do not act on each feature apart."""
_APART = (
    *("Activation", "ELU", "LeakyReLU", "ReLU", "Identity", "Lambda", "Rescaling", "RepeatVector"),
    *("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise", "SpatialDropout1D", "SpatialDropout2D"),
    *("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract"),
    *("AveragePooling1D", "Cropping1D", "GlobalAveragePooling1D", "GlobalMaxPooling1D", "MaxPooling1D"),
    *("UpSampling1D", "ZeroPadding1D"),
)
"""Names of Keras's layers that act on each feature apart; a `Lambda` may."""
_LEFT_BY = "_tfdist_left_in_parts_by"
"""Attribute of a tensor whose features are in parts: the layer that has left them so, for messages."""


class _Thread(threading.local):
    """State of a thread: number of the calls of layers that are under way."""

    depth = 0


_thread = _Thread()


@Once
def install() -> None:
    """Installs the seam, once."""
    replace(layer.Layer, "__call__", _checked)


def leave(outputs: Any, title: str) -> None:
    """Notes that the features of outputs are in parts.

    Args:
        outputs: what a layer returns.
        title: the layer, for messages.
    """
    setattr(outputs, _LEFT_BY, title)


def left_by(given: Any) -> str | None:
    """Returns the layer that has left features of some tensors in parts; None if they are whole, or it is not known.

    Args:
        given: tensors in any structure.
    """
    return next((title for tensor in tree.flatten(given) if (title := getattr(tensor, _LEFT_BY, None))), None)


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses layers of Keras that look at several features, and models that return features in parts."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        title = left_by((args, kwargs))
        is_kerass = type(self).__module__.startswith("keras.") and not isinstance(self, keras.Model)
        if title and is_kerass and not _acts_on_features_apart(self):
            raise ValueError(
                f"{title} leaves features on several processes (gather_output=False), and the layer {self.name} "
                f"({type(self).__name__}) looks at several of them, or has weights or a loss: use gather_output=True, "
                "or put the layer behind a RowParallelDense(input_is_parallel=True)"
            )
        _thread.depth += 1
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            _thread.depth -= 1
        if title and is_kerass:
            leave(outputs, title)
        elif isinstance(self, keras.Model) and not _thread.depth and _is_computed(outputs):
            title = left_by(outputs)
            if title:
                raise ValueError(
                    f"the model {self.name} returns what {title} leaves on several processes: use gather_output=True, "
                    "or let a RowParallelDense(input_is_parallel=True) follow"
                )
        return outputs

    return __call__


def _acts_on_features_apart(self: Any) -> bool:
    name = getattr(getattr(self, "activation", None), "__name__", "")
    return type(self).__name__ in _APART and name not in OF_ALL_FEATURES and self.activity_regularizer is None


def _is_computed(outputs: Any) -> bool:
    """Returns whether outputs are not just shapes."""
    return not symbolic_scope.in_symbolic_scope() and all(map(tf.is_tensor, tree.flatten(outputs)))
