"""How tensors and arrays share memory, and how places in a graph are named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tensorflow as tf

_DLPACK_KINDS = "fiuc"


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """The array as a tensor that stands on the same memory, where DLPack allows it."""
    if array.dtype == object:
        return tf.convert_to_tensor(array, tf.string)
    if array.size == 0 or array.ctypes.data % 64 or not array.flags.writeable:  # DLPack has no word for that
        return tf.convert_to_tensor(array)
    if array.dtype.kind in _DLPACK_KINDS and array.dtype.isbuiltin == 1:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if array.dtype.itemsize == 2 and array.dtype.kind != "b":
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.as_dtype(array.dtype))
    return tf.convert_to_tensor(array)


def call_site(kind: str) -> str:
    """Names a place in the graph under construction: the same on every process, and after tracing again.

    The name is the path of function graphs, each with its place among its namesakes, and the place among the
    collectives of this kind in the innermost. It holds no shapes: a process whose last batch is smaller may have
    traced again with other ones.
    """
    graph = tf.compat.v1.get_default_graph()
    place = _count(graph, kind)
    path = []
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        # TensorFlow and Keras number what they name per process, anywhere in a name: these numbers differ as soon as
        # one process has traced or built something that another has not.
        name = re.sub(r"_+\d+(?=_|$)", "", graph.name)
        path.append(f"{name}#{_place_among_namesakes(graph, outer, name)}" if hasattr(outer, "outer_graph") else name)
        graph = outer
    return f"{'/'.join(reversed(path))}: {kind} #{place}"


def _count(graph: Any, kind: str) -> int:
    if not hasattr(graph, "_tfdist_sites"):
        graph._tfdist_sites = {}
    sites: dict[str, int] = graph._tfdist_sites
    sites[kind] = sites.get(kind, -1) + 1
    return sites[kind]


def _place_among_namesakes(graph: Any, outer: Any, name: str) -> int:
    if not hasattr(graph, "_tfdist_place"):
        graph._tfdist_place = _count(outer, f"graph {name}")
    return graph._tfdist_place
