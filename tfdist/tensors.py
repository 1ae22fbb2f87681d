"""Converts between arrays and tensors without copies, and names call sites in graphs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import numpy as np
import tensorflow as tf

_DLPACK_KINDS = "fiuc"


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Converts an eager tensor to an array, which shares its memory if possible."""
    if tensor.shape.rank == 0:  # TensorFlow makes a NumPy scalar of a bfloat16 scalar, which is no array to NumPy 2
        return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """Converts an array to a tensor, which shares its memory if DLPack allows it."""
    if array.dtype == object:
        return tf.convert_to_tensor(array, tf.string)
    if array.size == 0 or array.ctypes.data % 64 or not array.flags.writeable:  # not supported by DLPack
        return tf.convert_to_tensor(array)
    if array.dtype.kind in _DLPACK_KINDS and array.dtype.isbuiltin == 1:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if array.dtype.itemsize == 2 and array.dtype.kind != "b":
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.as_dtype(array.dtype))
    return tf.convert_to_tensor(array)


def call_site(kind: str, members: tuple[int, ...] = ()) -> str:
    """Returns a name for a call site in the graph under construction: the same on every process, and after retracing.

    The name is the path of function graphs, each with its index among graphs of the same name, and the index among the
    collectives of this kind in the innermost graph. Only collectives of the same group count, because a process may
    use groups that other members do not belong to. The name contains no shapes, because a process whose last batch is
    smaller may have retraced with other shapes.

    Args:
        kind: name of the collective.
        members: ranks of the group that runs the collective.
    """
    graph = tf.compat.v1.get_default_graph()
    place = _count(graph, (kind, members))
    path = []
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        name = unnumbered(graph.name)
        is_nested = hasattr(outer, "outer_graph")
        path.append(f"{name}#{_place_among_namesakes(graph, outer, (name, members))}" if is_nested else name)
        graph = outer
    return f"{'/'.join(reversed(path))}: {kind} #{place}"


def unnumbered(name: str) -> str:
    """Returns a name or path without the numbers that TensorFlow and Keras add anywhere in it.

    These numbers differ between processes as soon as one process has traced or built something that another has not.
    """
    return re.sub(r"_+\d+(?=[_/]|$)", "", name)


def _count(graph: Any, what: Hashable) -> int:
    if not hasattr(graph, "_tfdist_counts"):
        graph._tfdist_counts = {}
    counts: dict[Hashable, int] = graph._tfdist_counts
    counts[what] = counts.get(what, -1) + 1
    return counts[what]


def _place_among_namesakes(graph: Any, outer: Any, what: Hashable) -> int:
    if not hasattr(graph, "_tfdist_places"):
        graph._tfdist_places = {}
    places: dict[Hashable, int] = graph._tfdist_places
    if what not in places:
        places[what] = _count(outer, ("graph", what))
    return places[what]
