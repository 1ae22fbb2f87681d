"""What the layouts of a `keras.distribution.Distribution` say of weights and outputs."""

from __future__ import annotations

from typing import Any

from tfdist import notices
from tfdist.private import distributions as private
from tfdist.private import models
from tfdist.private.keras import distributions


def divides(distribution: Any, variable: Any) -> bool:
    """Returns whether a distribution divides a weight over several devices.

    Args:
        distribution: a `keras.distribution.Distribution`.
        variable: a Keras variable, whose value need not exist.

    Raises:
        ValueError: the layout is for another number of axes; or Keras finds several layouts for the path.
    """
    layout = distribution.get_variable_layout(variable)
    if layout is None:
        return False
    if len(layout.axes) != len(variable.shape):
        raise ValueError(
            f"keras.distribution: the layout {layout.axes} has {len(layout.axes)} axes; the weight {variable.path} of "
            f"shape {tuple(variable.shape)} has {len(variable.shape)}. Give it an axis of the mesh or None for each."
        )
    return bool(_dividing_axes(layout, distribution.device_mesh))


def check_keys(distribution: Any, model: Any, strict: bool) -> None:
    """Says once if no key of a distribution's `LayoutMap` matches anything of a model.

    Args:
        distribution: a `keras.distribution.Distribution`.
        model: a Keras model with weights.
        strict: whether that is an error.

    Raises:
        ValueError: no key matches, and ``strict`` is given.
    """
    layout_map = private.layouts_of(distribution)
    weights = [variable.path for variable in model.weights]
    outputs = [f"{layer.path}/output" for layer in models.layers_of(model)]
    if not layout_map or any(layout_map[path] is not None for path in weights + outputs):
        return
    keys = ", ".join(map(repr, layout_map))
    text = (
        f"keras.distribution: none of the keys {keys} of the LayoutMap matches a path of the model {model.name}, so "
        f"nothing is divided. Its weights are {', '.join(weights)}"
    )
    if strict:
        raise ValueError(f"{text}. Correct the keys, or leave out strict=True of tfdist.enable_keras_distribution.")
    notices.warn_once("tfdist: %s.", text)


def keep_together(layout: Any) -> None:
    """Says once of the layout of an activation that it is not split, if it should be along an axis but the batch's.

    Args:
        layout: a `keras.distribution.TensorLayout`.
    """
    current = distributions.distribution()
    if current is None:
        return
    axes = _dividing_axes(layout, current.device_mesh) - {current.batch_dim_name}
    if axes:
        text = (
            f"keras.distribution: activations are not split along {', '.join(sorted(map(repr, axes)))}, as the layout "
            f"{layout.axes} says: each process computes its share of the batch with whole weights"
        )
        notices.warn_once("tfdist: %s.", text)


def _dividing_axes(layout: Any, mesh: Any) -> set[str]:
    """Returns the axes of a layout along which the mesh has several devices."""
    mesh = layout.device_mesh or mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return {axis for axis in layout.axes if axis is not None and sizes[axis] > 1}
