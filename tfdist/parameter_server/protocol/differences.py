"""Compressed parameters: a server sends their differences from the parameters that a worker has.

`tfdist.compression.differences` encodes a difference. A worker takes each answer once, in the order of its pushes, and
a push that arrives again gets the same answer. In case of doubt the server sends whole parameters, which are the new
base: to a worker that has attached, and to one that sends a new generation, for example because it has pulled. The
server's side is `tfdist.parameter_server.shard.compressed_answers`.

Source: the compressed differences of DORE (Liu et al., A double residual compression algorithm, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.compression import differences
from tfdist.compression.method import Method
from tfdist.compression.policy import Policy
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.packing import CompressionMethods, VariableSpec

CopyVersion = tuple[int, int, int]
"""State of a worker's copy: the generation; the number of differences since whole parameters, 0 for whole ones; and the
step that the methods are chosen for."""


@dataclass(frozen=True)
class EncodedAnswer:
    """The parameters in an answer.

    Attributes:
        kinds: one kind for each variable, as in `Values`; empty if all are dense.
        arrays: arrays of the message.
        copy: state of the worker's copy after this answer; None if the server keeps no such copy.
    """

    kinds: tuple[Kind, ...]
    arrays: list[np.ndarray]
    copy: CopyVersion | None = None


class DifferenceMethods(CompressionMethods):
    """The method for each variable in each step, adapted to differences."""

    def difference_at(self, place: int, step: int) -> Method | None:
        """Returns the method for a variable; None if it is not compressed.

        Raises:
            ValueError: the method cannot encode differences.
        """
        method = self.at(place, step)
        try:
            return None if method is None else differences.as_contraction(method)
        except TypeError as error:
            raise ValueError(f"parameters cannot be compressed with {method}: {error}") from None


class ParameterDecoder(DifferenceMethods):
    """The worker's side for one server, which decodes parameters; takes the arguments of `CompressionMethods`.

    Attributes:
        generation: number of this copy, raised when the next answer has to be whole.
    """

    def __init__(self, policy: Policy, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        super().__init__(policy, variables, shapes)
        self.generation = 0
        self._count = -1
        self._has: dict[int, np.ndarray] = {}

    def forget(self) -> None:
        """Makes the next answer whole, because this worker has read other parameters."""
        self.generation += 1

    def received(self, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], copy: CopyVersion) -> PushedGradients:
        """Decodes the differences in an answer, and returns whole parameters.

        Args:
            kinds: one kind for each variable, as in `Values`.
            arrays: arrays of the message.
            copy: state of this copy after the answer.

        Raises:
            ValueError: the arrays do not fit the variables, or do not follow the last answer.
        """
        _, count, step = copy
        packed = [place for place, kind in enumerate(kinds) if kind == "packed"]
        cut = len(arrays) - len(packed)
        others: tuple[Kind, ...] = tuple("none" if kind == "packed" else kind for kind in kinds)
        plain = PushedGradients.received(others or ["dense"] * len(self.shapes.shapes), arrays[:cut], self.shapes)
        left = self.shapes.layout(plain.kinds).arrays(plain.vectors)
        if not count:
            self._has = {}
        elif count != self._count + 1:
            raise ValueError(f"difference {count} came after difference {self._count}; expected the next one")
        self._count = count
        for place, array in left.items():
            if self.is_chosen(place):
                self._has[place] = differences.base(array)
        for place, payload in zip(packed, arrays[cut:], strict=True):
            method, has = self.difference_at(place, step), self._has.get(place)
            if method is None or has is None:
                raise ValueError("got a difference, expected none: give all tasks the same Gradients(parameters=…)")
            try:
                method.decode(payload, has, np.add)
            except Exception as error:  # NumPy raises many types of errors for invalid bytes
                raise ValueError(f"a difference cannot be decoded: {error}") from error
            left[place] = has.astype(self.shapes.dtypes[place]).reshape(self.shapes.shapes[place])
        whole: tuple[Kind, ...] = tuple("dense" if kind == "packed" else kind for kind in kinds) or plain.kinds
        values = [left.get(place) for place in range(len(whole))]
        return PushedGradients(whole, self.shapes.layout(whole).vectors(values), plain.sparse)
