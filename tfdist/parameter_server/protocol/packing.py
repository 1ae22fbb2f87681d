"""Compressed gradients from one worker to one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.compression.method import Method, as_working, is_finite
from tfdist.compression.policy import FewerWorkers, Policy, chosen
from tfdist.compression.state import State
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class VariableSpec:
    """A whole variable of which a shard holds rows.

    Attributes:
        path: path of the variable.
        shape: shape of the whole variable, by which its method is chosen.
    """

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """Gradients as they are sent, some of them compressed.

    Attributes:
        kinds: kind of each variable's gradient.
        vectors: dense gradients, in the layout for these kinds.
        rest: rows and indices of each sparse gradient; then the payload of each compressed one.
    """

    kinds: tuple[Kind, ...]
    vectors: list[np.ndarray]
    rest: list[np.ndarray]

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays of a message, as `Unpacker.received` expects them."""
        return [*self.vectors, *self.rest]

    @classmethod
    def instead(cls, values: PushedGradients, payloads: Mapping[int, np.ndarray], shapes: Shapes) -> Packed:
        """Returns values with payloads in place of some of the dense ones.

        Args:
            values: values of a shard's variables, of the same kinds as gradients.
            payloads: the payloads, by place of the variable, in the order of places.
            shapes: shapes and dtypes of the values.
        """
        kinds: tuple[Kind, ...] = tuple(
            "packed" if place in payloads else kind for place, kind in enumerate(values.kinds)
        )
        arrays = shapes.layout(values.kinds).arrays(values.vectors)
        left = [None if place in payloads else arrays.get(place) for place in range(len(kinds))]
        sparse = [array for pair in values.sparse.values() for array in pair]
        return cls(kinds, shapes.layout(kinds).vectors(left), [*sparse, *payloads.values()])


class CompressionMethods:
    """The compression method for each variable of a shard, in each step.

    Args:
        policy: choice of the method for each variable.
        variables: whole variables that the shard has rows of.
        shapes: shapes and dtypes of these rows.

    Attributes:
        shapes: shapes and dtypes of the rows.
    """

    def __init__(self, policy: Policy, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        self.shapes = shapes
        self._schedules = [
            chosen(policy, variable.path, variable.shape) if dtype.name in _FLOATS else None
            for variable, dtype in zip(variables, shapes.dtypes, strict=True)
        ]

    def is_chosen(self, place: int) -> bool:
        """Returns whether a variable may be compressed in some step."""
        return self._schedules[place] is not None

    def at(self, place: int, step: int) -> Method | None:
        """Returns the method for a variable; None if it is not compressed.

        Raises:
            ValueError: the method is for workers that take every step together.
        """
        schedule = self._schedules[place]
        choice = None if schedule is None else schedule.at(step)
        if isinstance(choice, FewerWorkers) or (choice is not None and choice.momentum):
            raise ValueError(
                f"parameter servers cannot compress with {choice}: it needs workers that take every step together"
            )
        return choice


class Packer(CompressionMethods):
    """The worker's side, which compresses gradients and keeps their residuals.

    Args:
        policy: choice of the method for each variable.
        variables: whole variables that the shard has rows of.
        shapes: shapes and dtypes of these rows.
        worker: number of the worker, which seeds its random numbers.
    """

    def __init__(self, policy: Policy, variables: Sequence[VariableSpec], shapes: Shapes, worker: int) -> None:
        super().__init__(policy, variables, shapes)
        self._states = [
            State(f"{place} {variable.path}", seed=worker, shape=shape)
            for place, (variable, shape) in enumerate(zip(variables, shapes.shapes, strict=True))
        ]

    def packed(self, gradients: PushedGradients, step: int) -> Packed | PushedGradients:
        """Compresses the dense gradients that have a method. Residuals are added to the next gradients.

        Args:
            gradients: gradients of the shard's variables.
            step: number of this worker's step, from 0.
        """
        arrays = self.shapes.layout(gradients.kinds).arrays(gradients.vectors)
        methods = {place: self.at(place, step) for place in arrays}
        payloads = {place: self._encoded(place, arrays[place], method) for place, method in methods.items() if method}
        if not payloads:
            return gradients
        return Packed.instead(gradients, payloads, self.shapes)

    def _encoded(self, place: int, array: np.ndarray, method: Method) -> np.ndarray:
        state, vector = self._states[place], as_working(array.reshape(-1))
        state.scalers = method.scalers(vector if is_finite(vector) else np.zeros_like(vector), state)
        payload = method.encode(vector, state)
        state.scalers = None
        state.step += 1
        return payload


class Unpacker(CompressionMethods):
    """The server's side, which decodes what a `Packer` has compressed; takes the arguments of `CompressionMethods`."""

    def received(self, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], step: int) -> PushedGradients:
        """Decodes the gradients of a message; like `PushedGradients.received`.

        Args:
            kinds: kind of each variable's gradient; empty if all are dense.
            arrays: arrays of the message.
            step: number of the worker's step.

        Raises:
            ValueError: the arrays do not fit the variables, or their methods.
        """
        packed = [place for place, kind in enumerate(kinds) if kind == "packed"]
        if not packed:
            return PushedGradients.received(kinds, arrays, self.shapes)
        if len(kinds) != len(self.shapes.shapes) or len(arrays) < len(packed):
            raise ValueError(f"{len(arrays)} arrays of {len(kinds)} gradients for {len(self.shapes.shapes)} variables")
        cut = len(arrays) - len(packed)
        others: list[Kind] = ["none" if kind == "packed" else kind for kind in kinds]
        plain = PushedGradients.received(others, arrays[:cut], self.shapes)
        left = self.shapes.layout(others).arrays(plain.vectors)
        gradients: list[np.ndarray | None] = [left.get(place) for place in range(len(kinds))]
        for place, payload in zip(packed, arrays[cut:], strict=True):
            try:
                gradients[place] = self._decoded(place, payload, step)
            except Exception as error:  # NumPy raises many types of errors for invalid bytes
                raise ValueError(f"a packed gradient cannot be decoded: {error}") from error
        whole: tuple[Kind, ...] = tuple("dense" if kind == "packed" else kind for kind in kinds)
        return PushedGradients(whole, self.shapes.layout(whole).vectors(gradients), plain.sparse)

    def _decoded(self, place: int, payload: np.ndarray, step: int) -> np.ndarray:
        method, shape, dtype = self.at(place, step), self.shapes.shapes[place], self.shapes.dtypes[place]
        if method is None or payload.dtype != np.uint8 or payload.ndim != 1:
            raise ValueError("got a packed gradient, expected a plain one: give all tasks the same compression")
        out = as_working(np.empty(int(np.prod(shape)), dtype))
        return method.decode(payload, out).astype(dtype).reshape(shape)
