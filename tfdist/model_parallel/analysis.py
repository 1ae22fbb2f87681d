"""`tfdist.analyze`: what each call of a model computes and keeps, and which calls could run side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.model_parallel.call_graph import Call, CallGraph
from tfdist.model_parallel.call_shapes import shapes_of
from tfdist.model_parallel.flops import UnknownShapeError, flops
from tfdist.model_parallel.model_calls import ModelCall, ModelCalls, clear_losses
from tfdist.model_parallel.split_layers import SplitLayer
from tfdist.private import models
from tfdist.runtime.mesh import Mesh
from tfdist.sharding import Ownership
from tfdist.strategies.divided.footprint import Footprint, SplitFootprint, planned, planned_split
from tfdist.strategies.divided.split_axis import owner_of

_UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


class Analysis(CallGraph):
    """The costs of a model's calls for one batch; printed as a table.

    Attributes:
        batch_size: number of samples that the figures are for.
        calls: `Call` objects, in the order in which the model makes the calls.
        footprint: bytes of weights, of the optimizer's variables and of a step, if these are divided; else None.
        split: bytes of the weights of split layers, and of the optimizer's variables for them; None without a mesh.
        exchanged: bytes of activations that a process sends for split layers in a step of training, at most.
    """

    def __init__(
        self,
        calls: list[Call],
        batch_size: int,
        footprint: Footprint | None = None,
        split: SplitFootprint | None = None,
        exchanged: float = 0,
    ) -> None:
        super().__init__(calls)
        self.batch_size = batch_size
        self.footprint = footprint
        self.split = split
        self.exchanged = exchanged

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        path = set(self.critical_path)
        table = Table(title=f"Forward pass of {self.batch_size} sample{'s' * (self.batch_size != 1)}")
        table.add_column("call", overflow="fold")
        table.add_column("kind", overflow="fold")
        for name in ("FLOPs", "share", "parameters", "activations"):
            table.add_column(name, justify="right")
        for name in ("critical", "device"):
            table.add_column(name)
        for call in self.calls:
            share = f"{call.flops / self.work:.0%}" if self.work else ""
            figures = short(call.flops), share, short(call.parameters), f"{short(call.activations)}B"
            device = (call.device or "").removeprefix("/device:")
            table.add_row(call.name, call.kind, *figures, "*" if call.name in path else "", device)
        parameters = sum(call.parameters for call in self.calls)
        activations = sum(call.activations for call in self.calls)
        table.add_section()
        table.add_row("all", "", short(self.work), "", short(parameters), f"{short(activations)}B", "", "")
        text = io.StringIO()
        console = Console(file=text, width=120)
        console.print(table)
        console.print(
            f"Work W = {short(self.work)}FLOPs, depth D = {short(self.depth)}FLOPs, W/D = {self.parallelism:.2f}"
        )
        for branches in self.branches:
            begin = "the inputs" if branches.begin is None else branches.begin
            parts = ", ".join(
                f"{part[0]}{f' … {part[-1]}' * (len(part) > 1)} ({short(cost)}FLOPs)"
                for part, cost in zip(branches.parts, branches.flops, strict=True)
            )
            console.print(
                f"Side by side from {begin} to {branches.end}: {parts}. On separate devices they save "
                f"{branches.gain / self.work:.0%} of the work."
                if self.work
                else f"Side by side: {parts}"
            )
        if self.footprint is not None:
            what = "Large weights and the optimizer are" if self.footprint.in_parts else "The optimizer is"
            console.print(f"{what} divided. {self.footprint}")
        if self.split is not None:
            console.print(f"{self.split} For a step it sends up to {short(self.exchanged)}B of activations.")
        return text.getvalue()

    def draw(self, path: Any) -> None:
        """Draws the graph: calls by depth, with larger circles for more computation and the critical path in red.

        Args:
            path: path of the picture, such as ``"model.svg"``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from tfdist.model_parallel.drawing import draw

        draw(self, path)


def analyze(
    model: Any,
    batch_size: int = 1,
    *,
    shard: str | None = None,
    gather: str = "layer",
    processes: int = 2,
    mesh: Mesh | None = None,
) -> Analysis:
    """Counts what each call of a model computes and keeps.

    Floating-point operations are those of the forward pass, counted by `tfdist.model_parallel.flops` in TensorFlow's
    graph of each call; a loop's body counts once for each iteration. A backward pass takes about twice as many. The
    counts are not times: a layer may be bound by memory, or by the start of its operations.

    Args:
        model: a Functional or Sequential model. Models inside it are opened, unless they are called more than once.
        batch_size: number of samples of a batch.
        shard: ``"optimizer"`` and ``"weights"`` also count what each process keeps and sends under
            `tfdist.AllReduceStrategy` with that ``shard``. The model is compiled; nothing is trained or allocated.
        gather: ``"layer"`` or ``"model"``, as for `tfdist.AllReduceStrategy`; for ``shard="weights"``.
        processes: number of processes, for ``shard``; at least 2. With a mesh it is the mesh's.
        mesh: also counts what split layers, such as `tfdist.layers.ColumnParallelDense`, keep and exchange under
            `tfdist.AllReduceStrategy` with that mesh, whose processes divide the batch. The model is compiled, and made
            outside of the scope of such a strategy.

    Returns:
        The calls, with the work W, the depth D, the critical path, and the branches that could run side by side.

    Raises:
        TypeError: ``mesh`` is not a `tfdist.Mesh`.
        ValueError: the model has no graph, since it is a subclass or is not built; a shape is known at run time only;
            or, for ``shard`` and ``mesh``, the model is not compiled, its optimizer cannot be divided so, a layer does
            not divide over the mesh, or its axis is not one of the mesh's.
    """
    if shard not in (None, "optimizer", "weights"):
        raise ValueError(f"tfdist.analyze: shard must be None, 'optimizer' or 'weights'; got {shard!r}")
    if gather not in ("layer", "model"):
        raise ValueError(f"tfdist.analyze: gather must be 'layer' or 'model'; got {gather!r}")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"tfdist.analyze: mesh must be a tfdist.Mesh, such as Mesh(data=2, model=2); got {mesh!r}")
    if not isinstance(processes, int) or processes < 2:
        raise ValueError(f"tfdist.analyze: processes must be an integer of at least 2; got {processes!r}")
    model_calls = ModelCalls(model)
    analysis = analysis_of(model_calls, batch_size)
    processes = processes if mesh is None else mesh.size
    parts = {} if mesh is None else _split_parts(model, mesh)
    footprint = planned(model, processes, shard == "weights", gather == "model", parts) if shard else None
    if mesh is None:
        return Analysis(list(analysis.calls), batch_size, footprint)
    exchanged = _exchanged(model_calls, shapes_of(model_calls, batch_size), mesh)
    return Analysis(list(analysis.calls), batch_size, footprint, planned_split(model, processes, parts), exchanged)


def analysis_of(model_calls: ModelCalls, batch_size: int, open_size: int | None = None) -> Analysis:
    """Counts what each call of a model computes and keeps; see `analyze`.

    Args:
        model_calls: the model's calls.
        batch_size: number of samples of a batch.
        open_size: size assumed for dimensions, other than the first, that the model's inputs leave open; None for none.

    Raises:
        ValueError: ``batch_size`` is not a positive number, or a shape is known at run time only.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1; got {batch_size!r}")
    places = {key: place for place, call in enumerate(model_calls.calls) for key in call.outputs}
    shapes = shapes_of(model_calls, batch_size, open_size)
    seen: set[int] = set()
    calls = []
    for call in model_calls.calls:
        operation = call.operation
        try:
            cost = flops(_traced(model_calls, call, shapes))
        except UnknownShapeError as error:
            raise ValueError(
                f"tfdist.analyze: in {call.name}, {error}. Give the model an Input of known shape."
            ) from None
        is_first = id(operation) not in seen
        seen.add(id(operation))
        calls.append(
            Call(
                call.name,
                type(operation).__name__,
                tuple(dict.fromkeys(places[key] for key in call.inputs if key in places)),
                cost,
                operation.count_params() if is_first and isinstance(operation, keras.Layer) else 0,
                sum(_bytes(model_calls.tensors[key], shapes[key]) for key in call.outputs),
                call.device,
            )
        )
    return Analysis(calls, batch_size)


def _traced(model_calls: ModelCalls, call: ModelCall, shapes: Mapping[int, tf.TensorShape]) -> Any:
    """Returns the graph of one call, before TensorFlow optimizes it."""
    keys = list(dict.fromkeys(call.inputs))

    @tf.function(autograph=False)
    def run(*values: tf.Tensor) -> Any:
        tensors = dict(zip(keys, values, strict=True))
        model_calls.run([call], tensors)
        return [tensors[key] for key in call.outputs]

    specs = [tf.TensorSpec(shapes[key], model_calls.tensors[key].dtype) for key in keys]
    try:
        return run.get_concrete_function(*specs).graph
    finally:
        clear_losses([call])


def _split_parts(model: Any, mesh: Mesh) -> dict[int, Ownership]:
    """Returns the parts of the weights of split layers that each process of a mesh would keep, by id of the weights."""
    parts = {}
    for layer in models.layers_of(model):
        for weight, split in layer.splits() if isinstance(layer, SplitLayer) else ():
            places = [mesh.place(split.mesh_axis, rank) for rank in range(mesh.size)]
            number = mesh.axes[split.mesh_axis]
            if number > 1:
                parts[id(weight)] = owner_of(tuple(weight.shape), split, number, places)
    return parts


def _exchanged(model_calls: ModelCalls, shapes: Mapping[int, tf.TensorShape], mesh: Mesh) -> float:
    """Returns the bytes of activations that a process sends for split layers in a step, at most."""

    def own_bytes(keys: Sequence[int]) -> float:
        return sum(_bytes(model_calls.tensors[key], shapes[key]) for key in keys) / mesh.size

    return sum(
        call.operation.exchanged(own_bytes(call.inputs), own_bytes(call.outputs), mesh.axes[call.operation.mesh_axis])
        for call in model_calls.calls
        if isinstance(call.operation, SplitLayer)
    )


def _bytes(tensor: Any, shape: tf.TensorShape) -> int:
    elements = shape.num_elements()
    if elements is None:
        raise ValueError(
            f"tfdist.analyze: the shape {tensor.shape} is known at run time only. Give the model an Input of known "
            "shape."
        )
    return elements * tf.as_dtype(tensor.dtype).size


def short(number: float) -> str:
    """Formats a number in three digits, followed by a space and its unit's letter, if any.

    Args:
        number: number to format, not negative.
    """
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:g} "
