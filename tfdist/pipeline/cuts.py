"""Cuts of a model into stages: named by the user, or chosen so that the most costly stage costs least."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tfdist.model_parallel.analysis import analysis_of
from tfdist.model_parallel.call_graph import Call
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.model_parallel.partition import Partition, bytes_kept
from tfdist.model_parallel.split_layers import SplitLayer
from tfdist.model_parallel.splitting import split
from tfdist.strategies.divided import described_variables

Cuts = Sequence[str] | Partition | Literal["flops", "memory"]
"""How a model is cut: the names of the calls that begin all stages but the first; a result of `tfdist.partition`; or
the quantity to balance."""


_OPEN_SIZE = 128
"""Size assumed for open dimensions of inputs, such as a sequence's length, when the costs of calls are compared."""


def check(cuts: Any, stages: int) -> None:
    """Checks cuts as far as possible without a model.

    Args:
        cuts: ``cuts`` argument of `tfdist.PipelineStrategy`.
        stages: number of stages.

    Raises:
        TypeError: ``cuts`` has the wrong type.
        ValueError: ``cuts`` is an unknown string, or makes another number of stages.
    """
    if isinstance(cuts, str):
        if cuts not in ("flops", "memory"):
            raise ValueError(
                'PipelineStrategy(cuts=…) must be "flops" or "memory", the cost to balance, or a list of names; got '
                f"{cuts!r}"
            )
        return
    if isinstance(cuts, Partition):
        made = len(cuts.stages)
    elif isinstance(cuts, Sequence) and all(isinstance(cut, str) for cut in cuts):
        made = len(cuts) + 1
    else:
        raise TypeError(
            'PipelineStrategy(cuts=…) must be "flops", "memory", a list of the names of the layers that stages but the '
            f"first begin with, or the result of tfdist.partition; got {cuts!r}"
        )
    if made != stages:
        given = "those of tfdist.partition" if isinstance(cuts, Partition) else repr(cuts)
        raise ValueError(
            f"PipelineStrategy(stages={stages}): the cuts, {given}, make {made} stages; give both for one number of "
            "stages"
        )


def ends_of(calls: ModelCalls, stages: int, cuts: Cuts) -> list[int]:
    """Returns where each stage ends, as indices into a model's calls.

    Args:
        calls: the model's calls.
        stages: number of stages, at most the number of calls.
        cuts: cuts that `check` has accepted.

    Raises:
        ValueError: the model makes too few calls, lacks a named call, makes the calls in another order, or has other
            calls than the partition; the costs of its calls are unknown; or a cut is where features are on several
            processes.
    """
    possible = _possible_ends(calls)
    ends = _balanced_ends(calls, stages, cuts, possible) if isinstance(cuts, str) else _named_ends(calls, cuts)
    for end in ends:
        if end not in possible:
            raise ValueError(
                f"PipelineStrategy(cuts={cuts!r}): the features that {calls.calls[end - 1].name} leaves are on several "
                "processes (gather_output=False), and go to a layer of the same stage: cut the model before or after "
                "the layers between a ColumnParallelDense and its RowParallelDense(input_is_parallel=True)"
            )
    return ends


def _possible_ends(calls: ModelCalls) -> list[int]:
    """Returns where a stage may end: not where the features of a tensor that is sent would be on several processes."""
    in_parts: set[int] = set()
    for call in calls.calls:
        of = call.operation
        takes_parts = isinstance(of, SplitLayer) and of.takes_parts
        if (isinstance(of, SplitLayer) and of.leaves_parts) or (not takes_parts and in_parts.intersection(call.inputs)):
            in_parts.update(call.outputs)
    ends = range(1, len(calls.calls) + 1)
    return [end for end in ends if in_parts.isdisjoint(calls.needed_of(0, end))] if in_parts else list(ends)


def _balanced_ends(calls: ModelCalls, stages: int, cost: str, possible: Sequence[int]) -> list[int]:
    if stages > len(possible):
        made = len(calls.calls)
        apart = "" if len(possible) == made else f", which can be cut in {len(possible) - 1} places"
        raise ValueError(f"{stages} stages need at least as many calls of layers; this model makes {made}{apart}")
    # A small cost for each call, so that calls without a cost are spread over the stages, too.
    weighs = [float(bytes_kept(call) if cost == "memory" else call.flops) for call in _costs(calls, cost)]
    least = 1e-6 * sum(weighs) / len(weighs)
    between = itertools.pairwise([0, *possible])
    return [possible[end - 1] for end in split([_sum(weighs[begin:end], least) for begin, end in between], stages)]


def _named_ends(calls: ModelCalls, cuts: Sequence[str] | Partition) -> list[int]:
    names = [call.name for call in calls.calls]
    if isinstance(cuts, Partition):
        planned = [name for stage in cuts.stages for name in stage.calls]
        if planned != names:
            raise ValueError(
                "PipelineStrategy(cuts=…): the partition was made for a model with other calls: it begins with "
                f"{planned[0]!r} and has {len(planned)} calls, this model begins with {names[0]!r} and has {len(names)}"
            )
        return list(itertools.accumulate(len(stage.calls) for stage in cuts.stages))
    begins = [_place(name, names) for name in cuts]
    if begins != sorted(set(begins)) or begins[:1] == [0]:
        raise ValueError(
            f"PipelineStrategy(cuts={list(cuts)}): each cut must come after the one before it, and the first one after "
            f"the first call; the model makes its calls in the order {', '.join(names)}"
        )
    return [*begins, len(names)]


def _sum(costs: Sequence[float], least: float) -> float:
    return sum(cost + least for cost in costs)


def _costs(calls: ModelCalls, cuts: str) -> Sequence[Call]:
    try:
        # Layers of a model that was placed before may have their variables on other processes: shapes are enough.
        with described_variables.reading(lambda variable: tf.zeros(variable.shape, variable.dtype)):
            return analysis_of(calls, batch_size=1, open_size=_OPEN_SIZE).calls
    except ValueError as error:
        raise ValueError(
            f'PipelineStrategy(cuts="{cuts}"): the costs of the calls of this model are unknown, even with '
            f"{_OPEN_SIZE} for sizes that its inputs leave open. Give the inputs a known shape, or name the calls that "
            f"stages but the first begin with: cuts=[…], out of {', '.join(call.name for call in calls.calls)}"
        ) from error


def _place(name: str, names: Sequence[str]) -> int:
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        raise ValueError(
            f"PipelineStrategy(cuts=…): the model makes no call {name!r}; use a name such as {', '.join(near)}"
        )
    return names.index(name)
