"""Splits the gradients of a whole model by root server."""

from __future__ import annotations

import numpy as np

from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.worker.model import Model
from tfdist.sharding import VariablePart


def split_by_root(gradients: PushedGradients, shapes: Shapes, model: Model) -> list[PushedGradients]:
    """Returns each root's part of the gradients.

    Args:
        gradients: gradients of all variables.
        shapes: shapes and dtypes of all variables.
        model: the same variables, distributed over the roots.
    """
    if len(model.shapes) == 1:
        return [gradients]
    dense = shapes.layout(gradients.kinds).arrays(gradients.vectors)
    by_root = []
    for parts, root_shapes in zip(model.dealing.shards, model.shapes, strict=True):
        kinds = tuple(gradients.kinds[part.variable] for part in parts)
        arrays = [part.rows(dense[part.variable]) if part.variable in dense else None for part in parts]
        sparse = {
            place: _named(*gradients.sparse[part.variable], part)
            for place, part in enumerate(parts)
            if part.variable in gradients.sparse
        }
        by_root.append(PushedGradients(kinds, root_shapes.layout(kinds).vectors(arrays), sparse))
    return by_root


def _named(rows: np.ndarray, indices: np.ndarray, part: VariablePart) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that belong to a part, with their indices in it."""
    in_part = (part.begin <= indices) & (indices < part.end)
    return rows[in_part], indices[in_part] - part.begin
