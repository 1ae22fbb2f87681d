"""Pictures of a model's calls."""

from __future__ import annotations

import math
from typing import Any

from tfdist.model_parallel.call_graph import CallGraph


def draw(graph: CallGraph, path: Any) -> None:
    """Draws calls from top to bottom by depth; see `tfdist.model_parallel.analysis.Analysis.draw`.

    Args:
        graph: graph of the model's calls.
        path: path of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing an analysis needs matplotlib: `pip install matplotlib`") from None
    places = positions(graph)
    critical = set(graph.critical_path)
    most = max((call.flops for call in graph.calls), default=0) or 1
    width = 1 + max((x for x, _ in places), default=0)
    height = 1 + max((y for _, y in places), default=0)
    figure = Figure(figsize=(3 + 2.6 * width, 1 + 0.8 * height))
    axes = figure.subplots()
    for (x, y), call in zip(places, graph.calls, strict=True):
        for source in call.inputs:
            is_critical = call.name in critical and graph.calls[source].name in critical
            axes.annotate(
                "",
                xy=(x, -y),
                xytext=(places[source][0], -places[source][1]),
                arrowprops={
                    "arrowstyle": "->",
                    "color": "tab:red" if is_critical else "0.5",
                    "shrinkA": 9,
                    "shrinkB": 9,
                },
            )
        color = "tab:red" if call.name in critical else "tab:blue"
        axes.scatter([x], [-y], s=30 + 400 * math.sqrt(call.flops / most), color=color, alpha=0.6, zorder=2)
        axes.annotate(f"  {call.name}", (x, -y), va="center", fontsize=8, zorder=3)
    axes.set_xlim(-0.7, width + 0.3)
    axes.set_ylim(-height + 0.3, 0.7)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")


def positions(graph: CallGraph) -> list[tuple[int, int]]:
    """Returns column and row of each call: the row below the lowest of its inputs, the first free column.

    Args:
        graph: graph of the model's calls.
    """
    rows: list[int] = []
    taken: dict[int, int] = {}
    cells = []
    for call in graph.calls:
        row = 1 + max((rows[place] for place in call.inputs), default=-1)
        rows.append(row)
        column = taken.get(row, 0)
        taken[row] = column + 1
        cells.append((column, row))
    return cells
