"""Conversion between the tensors of variables and the vectors of parameter servers, in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.parameter_server.protocol.gradients import Kind
from tfdist.parameter_server.worker.model import Model


def kinds_of(gradients: Sequence[Any], model: Model) -> list[tuple[Kind, ...]]:
    """Returns, for each server, the kinds of the gradients of its parts.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None, one for each variable.
        model: description of the variables on the servers.
    """
    kinds: list[Kind] = [
        "none" if gradient is None else "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"
        for gradient in gradients
    ]
    return [tuple(kinds[part.variable] for part in parts) for parts in model.dealing.shards]


def tensors_for_server(server: int, gradients: Sequence[Any], model: Model) -> list[tf.Tensor]:
    """Returns the tensors for a server: a vector of each dtype, then rows and indices of each sparse gradient.

    Args:
        server: number of the server.
        gradients: tensors, `tf.IndexedSlices` or None, one for each variable.
        model: description of the variables on the servers.
    """
    parts, shapes = model.dealing.shards[server], model.shapes[server]
    layout = shapes.layout(kinds_of(gradients, model)[server])
    vectors: list[list[tf.Tensor]] = [[] for _ in layout.dtypes]
    sparse = []
    for place, part in enumerate(parts):
        gradient = gradients[part.variable]
        is_whole = model.is_whole(part)
        if isinstance(gradient, tf.IndexedSlices):
            rows, indices = gradient.values, tf.cast(gradient.indices, tf.int64)
            if not is_whole:
                in_part = tf.where((indices >= part.begin) & (indices < part.end))[:, 0]
                rows, indices = tf.gather(rows, in_part), tf.gather(indices, in_part) - part.begin
            sparse += [rows, indices]
        elif gradient is not None:
            part_gradient = gradient if is_whole else gradient[part.begin : part.end]
            vectors[layout.spans[place].vector].append(tf.reshape(part_gradient, [-1]))
    return [*(tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0) for tensors in vectors), *sparse]


class PushAnswerLayout:
    """Layout of the servers' answers to a push: values, but only changed rows of variables with a sparse gradient.

    Args:
        kinds: kinds of the gradients, by server.
        model: description of the variables on the servers.

    Attributes:
        specs: types of the tensors: for each server a vector of each dtype, then rows and indices of each sparse part.
    """

    def __init__(self, kinds: Sequence[Sequence[Kind]], model: Model) -> None:
        self._model = model
        self._kinds: list[list[Kind]] = [
            ["sparse" if kind == "sparse" else "dense" for kind in shard_kinds] for shard_kinds in kinds
        ]
        self.specs: list[tf.TensorSpec] = []
        for shard_kinds, shapes in zip(self._kinds, model.shapes, strict=True):
            layout = shapes.layout(shard_kinds)
            self.specs += [
                tf.TensorSpec([length], dtype) for length, dtype in zip(layout.lengths, layout.dtypes, strict=True)
            ]
            for kind, shape, dtype in zip(shard_kinds, shapes.shapes, shapes.dtypes, strict=True):
                if kind == "sparse":
                    self.specs += [tf.TensorSpec([None, *shape[1:]], dtype), tf.TensorSpec([None], tf.int64)]

    def assign_to(self, variables: Sequence[Any], tensors: Sequence[tf.Tensor]) -> None:
        """Assigns values to variables, and scatters rows into others.

        Args:
            variables: the Keras variables of the model.
            tensors: answered tensors, with the types in `specs`.
        """
        rest = iter(tensors)
        parts: dict[int, list[tuple[int, tf.Tensor]]] = {}
        for shard, shapes, kinds in zip(self._model.dealing.shards, self._model.shapes, self._kinds, strict=True):
            layout = shapes.layout(kinds)
            cut = []
            for number, vector in enumerate(next(rest) for _ in layout.dtypes):
                sizes = [span.end - span.begin for span in layout.spans.values() if span.vector == number]
                cut.append(iter(tf.split(vector, sizes)))
            for place, part in enumerate(shard):
                if place in layout.spans:
                    value = tf.reshape(next(cut[layout.spans[place].vector]), shapes.shapes[place])
                    parts.setdefault(part.variable, []).append((part.begin, value))
                else:
                    rows, indices = next(rest), next(rest)
                    variables[part.variable].value.scatter_update(tf.IndexedSlices(rows, indices + part.begin))
        for number, pieces in parts.items():
            ordered = [value for _, value in sorted(pieces, key=lambda pair: pair[0])]
            variables[number].assign(ordered[0] if len(ordered) == 1 else tf.concat(ordered, 0))
