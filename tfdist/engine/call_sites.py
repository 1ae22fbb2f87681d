"""Names the call sites of collectives in graphs, alike on all processes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from tfdist.private.graphs import is_called
from tfdist.tensors import unnumbered

_AROUND_FIRST_CALL = "fn_with_cond"


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
    graphs = _functions_around(graph)
    path = [unnumbered(graphs[-1].name)] if graphs else []
    for inner, outer in reversed(list(itertools.pairwise(graphs))):
        name = unnumbered(inner.name)
        path.append(f"{name}#{_place_among_namesakes(inner, outer, (name, members))}")
    return f"{'/'.join(path)}: {kind} #{place}"


def _functions_around(graph: Any) -> list[Any]:
    """Returns the graphs of functions in which a call site is, from the inside.

    Those are left out that TensorFlow puts around the first call of a function whose variables it cannot initialize
    before: later traces of the function, which one process alone may need, are not within them.
    """
    graphs: list[Any] = []
    while hasattr(graph, "outer_graph"):
        if graph.name.startswith(_AROUND_FIRST_CALL) and graphs:
            graphs.pop()  # the branch of its conditional
        else:
            graphs.append(graph)
        graph = graph.outer_graph
    return graphs


def _count(graph: Any, what: Hashable) -> int:
    counts: dict[Hashable, int] = _attribute(graph, "_tfdist_counts", {})
    counts[what] = counts.get(what, -1) + 1
    return counts[what]


def _place_among_namesakes(graph: Any, outer: Any, what: Hashable) -> int:
    """Returns the index of a graph among those of the same name in the same graph, abandoned ones not counted.

    TensorFlow abandons the first trace of a function that makes variables, and traces it again. Whether variables are
    missing is a fact of one process: one may have restored its optimizer from a file.
    """
    places: dict[Hashable, int] = _attribute(graph, "_tfdist_places", {})
    if what not in places:
        namesakes: list[Any] = _attribute(outer, "_tfdist_namesakes", {}).setdefault(what, [])
        if namesakes and _is_traced_again(namesakes[-1], graph, outer):
            namesakes.pop()
        places[what] = len(namesakes)
        namesakes.append(graph)
    return places[what]


def _is_traced_again(earlier: Any, graph: Any, outer: Any) -> bool:
    """Returns whether TensorFlow, which traces a function once for each signature, traces one again.

    A function that is only prepared for a later call (`get_concrete_function`) has another signature, or is not traced
    again.
    """
    alike = earlier.structured_input_signature == graph.structured_input_signature
    return alike and not is_called(earlier, outer)


def _attribute(graph: Any, name: str, default: Any) -> Any:
    if not hasattr(graph, name):
        setattr(graph, name, default)
    return getattr(graph, name)
