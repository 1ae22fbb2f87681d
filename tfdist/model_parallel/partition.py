"""`tfdist.partition`: divides a model into contiguous stages, each on a device of its own."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.model_parallel import keras_placement, stage_times
from tfdist.model_parallel.analysis import Analysis, analysis_of, short
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.model_parallel.placed_gradients import placed
from tfdist.model_parallel.splitting import split
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.devices import device_names

Balance = Literal["time", "memory", "flops"]

_COPIES = 4
"""Bytes that training keeps for each byte of a weight: itself, its gradient, and two slots, as with Adam."""
_TRIES = 5
"""Largest number of divisions that are measured."""


@dataclass(frozen=True)
class Stage:
    """Contiguous calls of a model.

    Attributes:
        calls: names of the calls.
        device: device of the calls; None without devices.
        flops: floating-point operations of the forward pass, for a batch.
        parameters: number of parameters of the layers whose first call is in this stage.
        activations: bytes of the calls' outputs, for a batch.
        cost: cost that was balanced: seconds of a step, bytes, or FLOPs.
        sent: bytes of the tensors that this stage and earlier ones make and later ones need, for a batch.
    """

    calls: tuple[str, ...]
    device: str | None
    flops: int
    parameters: int
    activations: int
    cost: float
    sent: int


@dataclass(frozen=True)
class Partition:
    """A model in stages; printed as a table.

    Attributes:
        model: a copy of the model with the same weights, whose stages are on their devices; the model itself if there
            are no devices.
        stages: stages in their order.
        balance: kind of cost that was balanced.
        batch_size: number of samples of a batch, for costs and bytes.
    """

    model: Any
    stages: tuple[Stage, ...]
    balance: Balance
    batch_size: int

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        title = f"{len(self.stages)} stages, balanced by {self.balance}; a batch of {self.batch_size}"
        table = Table(title=title)
        table.add_column("stage")
        table.add_column("calls", overflow="fold")
        for name in ("parameters", "activations", "FLOPs", "cost", "to later stages"):
            table.add_column(name, justify="right")
        for number, stage in enumerate(self.stages):
            device = (stage.device or "").removeprefix("/device:")
            calls = f"{stage.calls[0]}{f' … {stage.calls[-1]} ({len(stage.calls)})' * (len(stage.calls) > 1)}"
            figures = short(stage.parameters), f"{short(stage.activations)}B", short(stage.flops)
            last = number == len(self.stages) - 1
            table.add_row(
                f"{number} {device}", calls, *figures, self._cost(stage), "" if last else f"{short(stage.sent)}B"
            )
        text = io.StringIO()
        Console(file=text, width=120).print(table)
        return text.getvalue()

    def _cost(self, stage: Stage) -> str:
        if self.balance == "time":
            return f"{1e3 * stage.cost:.2f} ms"
        return f"{short(stage.cost)}{'B' if self.balance == 'memory' else ''}"


def partition(
    model: Any,
    devices: Sequence[str] | None = None,
    *,
    stages: int | None = None,
    balance: Balance = "time",
    batch_size: int = 32,
    verbose: bool = True,
) -> Partition:
    """Divides a model into contiguous stages, and puts each one on a device.

    A stage is a contiguous part of the sequence in which the model makes its calls; connections may skip stages, and a
    layer may be called in several. The division minimizes the cost of the most costly stage, by

    - ``"time"``: seconds of a step, forward and backward, of this machine's default device. Stages are measured as a
      whole, since the times of single layers do not add up to that of a step. A division is measured, the layers' times
      are corrected by the result, and the model is divided again, until the division is the same or five were tried.
    - ``"memory"``: bytes of weights, gradients and two slots for each weight, and of activations.
    - ``"flops"``: floating-point operations; see `tfdist.analyze`.

    Args:
        model: a Functional or Sequential model; custom layers need a ``get_config``.
        devices: one device for each stage, such as ``["GPU:0", "GPU:1"]``.
        stages: number of stages, if there are no devices; the model is then neither copied nor placed.
        balance: kind of cost that is balanced.
        batch_size: number of samples of the batches in training.
        verbose: whether the stages are printed.

    Returns:
        The stages, and a copy of the model, which has to be compiled.

    Raises:
        ValueError: a device does not exist, the model has no graph or fewer calls than there are stages, or an argument
            is invalid.
    """
    names = None if devices is None else device_names.all_resolved("tfdist.partition", devices)
    if (names is None) == (stages is None):
        raise ValueError("tfdist.partition needs either devices, one for each stage, or the number of stages")
    if balance not in ("time", "memory", "flops"):
        raise ValueError(f'tfdist.partition(balance=…) must be "time", "memory" or "flops"; got {balance!r}')
    count = stages if names is None else len(names)
    model_calls = ModelCalls(model)
    analysis = analysis_of(model_calls, batch_size)
    if not isinstance(count, int) or not 1 <= count <= len(analysis.calls):
        raise ValueError(
            f"tfdist.partition: expected 1 to {len(analysis.calls)} stages, at most one for each call of {model.name}; "
            f"got {count!r}"
        )
    if balance == "time":
        ends, costs = _agreed(*_by_time(model_calls, analysis, count, batch_size))
    else:
        weighs = [bytes_kept(call) if balance == "memory" else call.flops for call in analysis.calls]
        ends = split(weighs, count)
        costs = [sum(weighs[begin:end]) for begin, end in _ranges(ends)]
    placed_on = [None] * count if names is None else names
    parts = tuple(
        _stage(analysis, begin, end, device, cost)
        for (begin, end), device, cost in zip(_ranges(ends), placed_on, costs, strict=True)
    )
    made = model if names is None else _on_devices(model, model_calls, ends, names)
    result = Partition(made, parts, balance, batch_size)
    if verbose:
        print(result)
    return result


def _agreed(ends: list[int], costs: list[float]) -> tuple[list[int], list[float]]:
    """Returns the chief's division in a strategy's scope, since each process has measured its own."""
    extended = current_strategy.current(DataParallel)
    if extended is None:
        return ends, costs
    numbers = extended.exchange.broadcast(tf.constant([*ends, *costs], tf.float64)).numpy().tolist()
    return [int(end) for end in numbers[: len(ends)]], numbers[len(ends) :]


def _ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def bytes_kept(call: Any) -> int:
    """Returns the bytes that training keeps for a call: weights, gradients, two slots for each weight, and activations.

    Args:
        call: a call of a `tfdist.model_parallel.analysis.Analysis`.
    """
    return int(_COPIES * 4 * call.parameters + call.activations)


def _stage(analysis: Analysis, begin: int, end: int, device: str | None, cost: float) -> Stage:
    calls = analysis.calls[begin:end]
    needed = {place for call in analysis.calls[end:] for place in call.inputs if place < end}
    return Stage(
        tuple(call.name for call in calls),
        device,
        sum(call.flops for call in calls),
        sum(call.parameters for call in calls),
        sum(call.activations for call in calls),
        cost,
        sum(analysis.calls[place].activations for place in needed),
    )


def _by_time(model_calls: ModelCalls, analysis: Analysis, count: int, batch_size: int) -> tuple[list[int], list[float]]:
    """Returns where stages end, and their seconds."""

    def measured(begin: int, end: int) -> float:
        return stage_times.seconds_of(model_calls, begin, end, batch_size)

    times: dict[tuple[int, int], float] = {}
    weighs = [float(call.flops) + 1e-3 * analysis.work / len(analysis.calls) for call in analysis.calls]
    best: tuple[float, list[int]] | None = None
    tried: list[list[int]] = []
    while len(tried) < _TRIES and (ends := split(weighs, count)) not in tried:
        tried.append(ends)
        for begin, end in _ranges(ends):
            if (begin, end) not in times:
                times[begin, end] = measured(begin, end)
        costs = [times[span] for span in _ranges(ends)]
        if best is None or max(costs) < best[0]:
            best = max(costs), ends
        for (begin, end), cost in zip(_ranges(ends), costs, strict=True):
            scale = cost / (sum(weighs[begin:end]) or 1.0)
            weighs[begin:end] = [scale * weight for weight in weighs[begin:end]]
    assert best is not None
    # Measured again: the smallest of several measurements is too small on average.
    return best[1], [measured(begin, end) for begin, end in _ranges(best[1])]


def _on_devices(model: Any, model_calls: ModelCalls, ends: list[int], devices: list[str]) -> Any:
    """Returns a copy of a model whose calls are on the devices of their stages."""
    keras_placement.install()
    of_nodes: dict[int, str] = {}
    homes: dict[int, str] = {}
    for (begin, end), device in zip(_ranges(ends), devices, strict=True):
        for call in model_calls.calls[begin:end]:
            of_nodes[id(call.node)] = device
            homes.setdefault(id(call.operation), device)  # a layer's variables are where it is called first

    @functools.cache  # inner models may share layers with those around them
    def copied(layer: Any) -> Any:
        if id(layer) in model_calls.graphs:
            return keras.models.clone_model(layer, clone_function=copied)
        if id(layer) not in homes:
            return layer.__class__.from_config(layer.get_config())
        with placed(homes[id(layer)]):
            return layer.__class__.from_config(layer.get_config())

    with contextlib.ExitStack() as stack:
        for owner, nodes in model_calls.graphs.values():
            devices_of_nodes = [of_nodes.get(id(node)) for node in nodes]
            stack.enter_context(keras_placement.temporarily(owner, nodes, devices_of_nodes))
        made = keras.models.clone_model(model, clone_function=copied)
    made.set_weights(model.get_weights())
    return made
