"""Compressed parameters: a server sends their differences from the parameters that a worker has.

`tfdist.compression.differences` encodes a difference. A worker takes each answer once, in the order of its pushes, and
a push that arrives again gets the same answer. In case of doubt the server sends whole parameters, which are the new
base: to a worker that has attached, and to one that sends a new generation, for example because it has pulled.

Source: the compressed differences of DORE (Liu et al., A double residual compression algorithm, 2020).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.compression import differences
from tfdist.compression.method import Method
from tfdist.compression.policy import Policy
from tfdist.compression.state import State
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import CompressionMethods, VariableSpec

_REMEMBERED = 2
"""Number of answers to a worker that are kept for repeated pushes: as many as it may wait for."""

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


@dataclass
class _WorkerCopy:
    """What the server knows about a worker's copy.

    Attributes:
        generation: generation of the worker's copy.
        count: number of differences since whole parameters.
        newest: sequence of the last push that was answered; -1 before the first.
        has: by variable, the worker's values, in the dtype in which they are encoded.
        states: by variable, the state of its encoding.
        answers: the last answers, by sequence of the push.
    """

    generation: int
    count: int = 0
    newest: int = -1
    has: dict[int, np.ndarray] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    answers: OrderedDict[int, EncodedAnswer] = field(default_factory=OrderedDict)


class _DifferenceMethods(CompressionMethods):
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


class ParameterEncoder(_DifferenceMethods):
    """The server's side, which encodes parameters; takes the arguments of `CompressionMethods`."""

    def __init__(self, policy: Policy, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        super().__init__(policy, variables, shapes)
        self._records: dict[int, _WorkerCopy] = {}

    def forget(self, worker: int) -> None:
        """Makes the next answer to a worker whole.

        Args:
            worker: number of the worker; may be unknown.
        """
        self._records.pop(worker, None)

    def answered(self, message: Push, values: PushedGradients) -> EncodedAnswer:
        """Returns the answer to a push.

        Args:
            message: the push.
            values: whole parameters, or only rows of those in ``message.has.rows``.

        Raises:
            ValueError: a method cannot encode differences.
        """
        record = self._records.get(message.worker)
        if record is not None and message.sequence <= record.newest:
            kept = record.answers.get(message.sequence)  # if it is not kept, the worker no longer waits for it
            return kept or EncodedAnswer(values.kinds, values.arrays())
        if record is None or record.generation != message.has.generation:
            record = self._records[message.worker] = _WorkerCopy(message.has.generation)
            answer = self._whole(record, message, values)
        else:
            record.count += 1
            answer = self._difference(record, message, values)
        record.newest = message.sequence
        record.answers[message.sequence] = answer
        while len(record.answers) > _REMEMBERED:
            record.answers.popitem(last=False)
        return answer

    def _whole(self, record: _WorkerCopy, message: Push, values: PushedGradients) -> EncodedAnswer:
        for place, array in self._dense(message, values).items():
            record.has[place] = differences.base(array)
        return EncodedAnswer(values.kinds, values.arrays(), (record.generation, 0, message.sequence))

    def _difference(self, record: _WorkerCopy, message: Push, values: PushedGradients) -> EncodedAnswer:
        payloads: dict[int, np.ndarray] = {}
        for place, array in self._dense(message, values).items():
            method, has = self.difference_at(place, message.sequence), record.has.get(place)
            if method is None or has is None:
                record.has[place] = differences.base(array)
                continue
            state = record.states.setdefault(place, State(f"{place}", seed=message.worker, shape=array.shape))
            payload = differences.advance(method, array, has, state)
            if payload is None:
                record.has[place] = differences.base(array)
            else:
                payloads[place] = payload
        kinds: tuple[Kind, ...] = tuple(
            "packed" if place in payloads else kind for place, kind in enumerate(values.kinds)
        )
        arrays = self.shapes.layout(values.kinds).arrays(values.vectors)
        left = [None if place in payloads else arrays.get(place) for place in range(len(kinds))]
        sparse = [array for pair in values.sparse.values() for array in pair]
        return EncodedAnswer(
            kinds,
            [*self.shapes.layout(kinds).vectors(left), *sparse, *payloads.values()],
            (record.generation, record.count, message.sequence),
        )

    def _dense(self, message: Push, values: PushedGradients) -> dict[int, np.ndarray]:
        """Returns, by variable, the values of those that may be compressed and of which the worker takes no rows."""
        arrays = self.shapes.layout(values.kinds).arrays(values.vectors)
        return {
            place: array for place, array in arrays.items() if self.is_chosen(place) and place not in message.has.rows
        }


class ParameterDecoder(_DifferenceMethods):
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

    def received(self, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], copy: CopyVersion) -> EncodedAnswer:
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
        given = PushedGradients(whole, self.shapes.layout(whole).vectors(values), plain.sparse)
        return EncodedAnswer(whole, given.arrays(), copy)
