"""Pictures of a pipeline's timeline: as text, and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.pipeline.actions import Action, ActionKind

if TYPE_CHECKING:
    from tfdist.pipeline.dry_run import PipelineTimeline

_COLORS = {
    ActionKind.FORWARD: "blue",
    ActionKind.BACKWARD: "green",
    ActionKind.INPUTS: "cyan",
    ActionKind.WEIGHTS: "olive",
}
_COLUMNS = 200
"""Largest number of columns of a text; wider ones would not be read."""


def as_text(timeline: PipelineTimeline, width: int = _COLUMNS) -> str:
    """Returns a line of text for each worker: actions by their notation, idle time as dots.

    Args:
        timeline: the timeline to show.
        width: largest number of columns of a line. Actions that are too short for their notation show its beginning.
    """
    spans = [span for row in timeline.spans for span in row]
    several = len({span.action.stage for span in spans}) > len(timeline.spans)
    longest = max(len(_label(span.action, several)) for span in spans)
    shortest = min(span.end - span.begin for span in spans)
    scale = min((longest + 1) / shortest, (width - 12) / timeline.seconds) if shortest > 0 else width / timeline.seconds
    lines = []
    for worker, row in enumerate(timeline.spans):
        line = ["."] * round(timeline.seconds * scale)
        for span in row:
            begin, end = round(span.begin * scale), round(span.end * scale)
            line[begin:end] = _label(span.action, several).ljust(end - begin, " ")[: end - begin]
        lines.append(f"worker {worker:<3}|{''.join(line)}|")
    return "\n".join(lines)


def summary(timeline: PipelineTimeline) -> str:
    """Returns the picture as text, followed by the idle time and the number of micro-batches that are kept.

    Args:
        timeline: the timeline to show.
    """
    kept = ", ".join(f"{timeline.kept(worker):g}" for worker in range(len(timeline.spans)))
    return (
        f"{as_text(timeline)}\nIdle: {timeline.idle_share:.1%} of the workers' time. Micro-batches whose activations "
        f"are kept at once, by worker: {kept}.\n"
    )


def draw(timeline: PipelineTimeline, path: Any) -> None:
    """Draws the timeline with matplotlib.

    Args:
        timeline: the timeline to show.
        path: path of the picture, such as ``"schedule.svg"``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing a schedule needs matplotlib: `pip install matplotlib`") from None
    count = len(timeline.spans)
    several = len({span.action.stage for row in timeline.spans for span in row}) > count
    figure = Figure(figsize=(12, 1 + 0.5 * count))
    axes = figure.subplots()
    for worker, row in enumerate(timeline.spans):
        for span in row:
            color = f"tab:{_COLORS[span.action.kind]}"
            axes.barh(worker, span.end - span.begin, left=span.begin, color=color, alpha=0.6, edgecolor="white")
            axes.annotate(
                _label(span.action, several),
                ((span.begin + span.end) / 2, worker),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(count), [f"worker {worker}" for worker in range(count)])
    axes.invert_yaxis()
    figure.savefig(path, bbox_inches="tight")


def _label(action: Action, several: bool) -> str:
    """Returns the notation of an action, without the stage if each worker has only one."""
    return str(action) if several else f"{action.kind.value}{action.micro_batch}"
