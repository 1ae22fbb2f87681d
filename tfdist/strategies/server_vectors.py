"""Conversion between the tensors of variables and the vectors of parameter servers, in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.parameter_server.gradients import Kind
from tfdist.parameter_server.model import Model


def kinds_of(gradients: Sequence[Any], model: Model) -> list[tuple[Kind, ...]]:
    """The kinds of gradients, by server, of its parts.

    Args:
        gradients: tensors, `tf.IndexedSlices` or None, one for each variable.
        model: the variables.
    """
    kinds: list[Kind] = [
        "none" if one is None else "sparse" if isinstance(one, tf.IndexedSlices) else "dense" for one in gradients
    ]
    return [tuple(kinds[part.variable] for part in parts) for parts in model.dealing.shards]


def given_to(server: int, gradients: Sequence[Any], model: Model) -> list[tf.Tensor]:
    """The tensors for a server: a vector of each dtype, then rows and indices of each sparse gradient.

    Args:
        server: its number.
        gradients: tensors, `tf.IndexedSlices` or None, one for each variable.
        model: the variables.
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
                own = tf.where((indices >= part.begin) & (indices < part.end))[:, 0]
                rows, indices = tf.gather(rows, own), tf.gather(indices, own) - part.begin
            sparse += [rows, indices]
        elif gradient is not None:
            own = gradient if is_whole else gradient[part.begin : part.end]
            vectors[layout.spans[place].vector].append(tf.reshape(own, [-1]))
    return [*(own[0] if len(own) == 1 else tf.concat(own, 0) for own in vectors), *sparse]


def values_of(vectors: Sequence[tf.Tensor], model: Model) -> list[tf.Tensor]:
    """The variables' values.

    Args:
        vectors: of all servers.
        model: the variables.
    """
    parts: dict[int, list[tuple[int, tf.Tensor]]] = {}
    rest = iter(vectors)
    for shard, shapes in zip(model.dealing.shards, model.shapes, strict=True):
        layout = shapes.layout()
        spans = [layout.spans[place] for place in range(len(shard))]
        cut = []
        for place, vector in enumerate(next(rest) for _ in layout.dtypes):
            cut.append(iter(tf.split(vector, [span.end - span.begin for span in spans if span.vector == place])))
        for part, span, shape in zip(shard, spans, shapes.shapes, strict=True):
            parts.setdefault(part.variable, []).append((part.begin, tf.reshape(next(cut[span.vector]), shape)))
    return [
        own[0][1] if len(own) == 1 else tf.concat([one for _, one in sorted(own, key=lambda pair: pair[0])], 0)
        for _, own in sorted(parts.items())
    ]
