"""Gathers weights of which each process keeps some rows, where layers use them (ZeRO-3, fully sharded data parallel).

A call of a layer gathers the layer's weights when the layer before begins, and drops them after it has used them. In
the backward pass of the call they are gathered again, and their gradients are summed over processes, of which each gets
that of its own rows (reduce-scatter). The layer itself runs once.

TensorFlow runs an operation as soon as its inputs are there, so all weights would be gathered at once, and kept until
the backward pass. Therefore a gather waits for activations, and what the tape has recorded to use the first tensor is
redirected to the second one.

Or the weights of all layers within the outermost call are gathered at once, and kept until the backward pass. Gradients
are still summed for each layer apart, so that they are summed and freed as they become known.

References:
    Rajbhandari et al., ZeRO: Memory optimizations toward training trillion parameter models, 2020.
    Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data parallel, 2023.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.private import graphs, models, rewiring
from tfdist.private import tensorflow as private
from tfdist.private.keras import tree
from tfdist.strategies.divided.weight_parts import WeightPart

Sums = Callable[[list[Any], list[WeightPart]], list[Any]]
"""Function that returns the sums over processes of the gradients of whole weights, of which each gets its rows'."""
Gather = Callable[[list[WeightPart]], list[tf.Tensor]]
"""Function that returns whole weights."""
_INPUTS = "_tfdist_inputs"
"""Attribute of a graph: the inputs of the last call of a layer in it whose weights were gathered."""


@dataclass
class _Whole:
    """A weight that has been gathered.

    Attributes:
        value: the whole weight.
        again: the whole weight as it was gathered again; None before that.
        since: the first operation that belongs to that gather; None in eager calls.
    """

    value: tf.Tensor
    again: tf.Tensor | None = None
    since: Any = None


class Collectives:
    """The collectives of the weights of one strategy.

    Args:
        gather: returns whole weights, on all processes.
        sums: sums the gradients of whole weights over processes, of which each gets those of its rows.
        at_once: whether the outermost call of a layer gathers the weights of all layers in it, once; otherwise each
            layer gathers its own, and again in the backward pass.

    Attributes:
        at_once: as given.
    """

    gathers_for_calls = True
    """Whether the weights are gathered for a call of their layer, which otherwise computes with this process's part."""

    def __init__(self, gather: Gather, sums: Sums, at_once: bool = False) -> None:
        self._gather = gather
        self._sums = sums
        self.at_once = at_once

    def gather(self, weights: list[WeightPart], after: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """Gathers weights; tapes do not record it.

        Args:
            weights: the weights.
            after: tensors of the graph that the gather waits for.
        """
        with private.stop_recording(), tf.control_dependencies(after):
            return self._gather(weights)

    def gathered(self, groups: Sequence[list[WeightPart]], after: Sequence[tf.Tensor] = ()) -> list[_Whole]:
        """Gathers weights, whose gradients tapes record.

        Args:
            groups: the weights, in groups whose gradients are summed together.
            after: tensors of the graph that the gather waits for.
        """
        values = iter(self.gather(list(itertools.chain(*groups)), after))
        return [
            whole for group in groups for whole in self._recorded(group, list(itertools.islice(values, len(group))))
        ]

    def _recorded(self, weights: list[WeightPart], values: list[tf.Tensor]) -> list[_Whole]:
        parts = [weight.copy.read_value() for weight in weights]

        def backward(*gradients: Any) -> list[Any]:
            for whole in wholes:
                if whole.again is not None and not tf.executing_eagerly():
                    rewiring.redirect(whole.value, whole.again, whole.since)
            with private.stop_recording():
                return self._sums(list(gradients), weights)

        wholes = [_Whole(value) for value in graphs.with_gradient(values, parts, backward)]
        return wholes

    def read(self, weight: WeightPart) -> tf.Tensor:
        """Returns a whole weight, in the call of a layer that has it, or elsewhere, where all processes read it.

        Args:
            weight: the weight.
        """
        for call in reversed(_thread.calls):
            value = call.value(weight)
            if value is not None:
                return value
        with _building(_home()):
            return self.gathered([[weight]])[0].value

    def assign(self, weight: WeightPart, value: Any) -> None:
        """Assigns this process's rows of a value of a whole weight.

        Args:
            weight: the weight.
            value: value of the whole weight.
        """
        for call in _thread.calls:
            call.forget(weight)
        weight.assign(value)


class _Call:
    """A call of a layer that is under way.

    Args:
        groups: weights that are gathered for it, at least one, in groups whose gradients are summed together.
        after: tensors that the gather of the weights waits for.
    """

    def __init__(self, groups: Sequence[list[WeightPart]], after: Sequence[tf.Tensor]) -> None:
        self._weights = list(itertools.chain(*groups))
        self._collectives = self._weights[0].collectives
        self._graph = _home()
        with _building(self._graph):
            wholes = self._collectives.gathered(groups, after)
        self._wholes = {id(weight): whole for weight, whole in zip(self._weights, wholes, strict=True)}

    def value(self, weight: WeightPart) -> tf.Tensor | None:
        """Returns a whole weight; None if it is not gathered for this call, or in another function's graph."""
        whole = self._wholes.get(id(weight))
        return whole.value if whole is not None and _home() is self._graph else None

    def forget(self, weight: WeightPart) -> None:
        """Has a weight that is assigned a value gathered anew where it is read next."""
        if self._wholes.pop(id(weight), None) is not None:
            self._weights.remove(weight)

    def gathering_again(self, outputs: Any) -> Any:
        """Returns the call's outputs, whose gradients have the weights gathered again first, if they are to be."""
        if self._collectives.at_once or self._graph is None or self._graph is not _graph():
            return outputs
        flat = tree.flatten(outputs)
        places = [
            place for place, output in enumerate(flat) if isinstance(output, tf.Tensor) and output.dtype.is_floating
        ]
        given = [flat[place] for place in places]

        def backward(*gradients: Any) -> list[Any]:
            self._gather_again(gradients)
            return list(gradients)

        made = graphs.with_gradient(given, given, backward) if given else []
        for place, output in zip(places, made, strict=True):
            logits = models.logits_of(flat[place])
            if logits is not None:  # Keras's losses ask whether there are any
                models.set_logits(output, logits)
            flat[place] = output
        return tree.pack_sequence_as(outputs, flat)

    def _gather_again(self, after: Sequence[Any]) -> None:
        if _graph() is not self._graph:  # the backward pass is a function of its own, which was given the weights
            return
        since = tf.constant(0).op
        weights = [weight for weight in self._weights if not self._is_written(weight)]
        if not weights:
            return
        values = self._collectives.gather(weights, [tf.convert_to_tensor(gradient) for gradient in after])
        for weight, value in zip(weights, values, strict=True):
            whole = self._wholes[id(weight)]
            whole.again, whole.since = value, since

    def _is_written(self, weight: WeightPart) -> bool:
        """Returns whether the weight may have another value now than when it was gathered."""
        handle = graphs.captured(self._graph, weight.copy.handle)
        return rewiring.is_written_since(handle, self._wholes[id(weight)].value.op)


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        calls: calls of layers that are under way, and have gathered weights, outer to inner.
        outermost: the graph of the outermost call of a layer that is under way, or None.
        depth: number of the calls of layers that are under way.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.outermost: Any = None
        self.depth = 0


_thread = _Thread()


@contextlib.contextmanager
def within() -> Iterator[bool]:
    """Context of the call of any layer; yields whether it is the outermost one that is under way."""
    is_outermost = not _thread.depth
    if is_outermost:
        _thread.outermost = _graph()
    _thread.depth += 1
    try:
        yield is_outermost
    finally:
        _thread.depth -= 1


@contextlib.contextmanager
def calling(groups: Sequence[Sequence[WeightPart]], arguments: Any) -> Iterator[Callable[[Any], Any]]:
    """Context of a call of a layer, in which it reads whole weights.

    Args:
        groups: weights that are gathered for the call unless they are already, of one strategy, in groups whose
            gradients are summed together.
        arguments: arguments of the call.

    Yields:
        A function that returns the outputs as the caller of the layer gets them.
    """
    missing = ([weight for weight in group if not _is_gathered(weight)] for group in groups)
    own = [group for group in missing if group]
    if not own:
        yield lambda outputs: outputs
        return
    call = _Call(own, _inputs_of_the_layer_before(arguments))
    _thread.calls.append(call)
    try:
        yield call.gathering_again
    finally:
        _thread.calls.pop()


def _is_gathered(weight: WeightPart) -> bool:
    return any(call.value(weight) is not None for call in _thread.calls)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _home() -> Any:
    """Returns the graph in which a weight is gathered: outside of the conditionals and loops within a model's call.

    A collective in a branch may take place on some processes only, and one in a loop would be repeated.
    """
    graph = _graph()
    while _thread.depth and graph is not _thread.outermost and graphs.is_branch_or_loop(graph):
        graph = graph.outer_graph
    return graph


def _building(graph: Any) -> contextlib.AbstractContextManager[Any]:
    """Context that adds to a graph; None is for eager calls."""
    return contextlib.nullcontext() if graph is None or graph is _graph() else graph.as_default()


def _inputs_of_the_layer_before(arguments: Any) -> list[tf.Tensor]:
    """Returns what a gather waits for, so that it overlaps with the layer before, and with no earlier one."""
    graph = _graph()
    if graph is None or graph is not _home():
        return []
    given = [value for value in tree.flatten(arguments) if isinstance(value, tf.Tensor)]
    before = getattr(graph, _INPUTS, given)
    setattr(graph, _INPUTS, given)
    return before
