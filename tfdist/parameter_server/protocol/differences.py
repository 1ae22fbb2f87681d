"""Parameters in fewer bytes: a server sends what they differ by from those that a worker has.

What is sent of a difference is in `tfdist.compression.differences`. Answers are in order: a worker takes each once, in
the order of its pushes, and a push that comes again gets the same answer. Where there is doubt, whole parameters are
sent and are the new base: to a worker that has attached, and when a worker says so by another generation, as after a
reading.

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
from tfdist.parameter_server.protocol.gradients import Gradients, Kind, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import Methods, Whole

_REMEMBERED = 2
"""Answers to a worker that may be asked for again: as many as it may wait for."""

Copy = tuple[int, int, int]
"""The worker's generation; the number of differences since whole parameters, 0 for these; the step, by which methods
are chosen."""


@dataclass(frozen=True)
class Answered:
    """The parameters in an answer.

    Attributes:
        kinds: as of `Values`; empty if all are dense.
        arrays: of the message.
        copy: what the worker has then; None if nobody keeps that.
    """

    kinds: tuple[Kind, ...]
    arrays: list[np.ndarray]
    copy: Copy | None = None


@dataclass
class _Record:
    """What a worker has.

    Attributes:
        generation: of the worker.
        count: differences since whole parameters.
        newest: sequence of the last push that was answered.
        has: by variable, its values, in the dtype in which they are encoded.
        states: by variable, of its encoding.
        answers: the last ones, by sequence.
    """

    generation: int
    count: int = 0
    newest: int = -1
    has: dict[int, np.ndarray] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    answers: OrderedDict[int, Answered] = field(default_factory=OrderedDict)


class _Encoded(Methods):
    """The method for each variable, in each step, as differences need it."""

    def difference_at(self, place: int, step: int) -> Method | None:
        """The method for a variable; None if it is not compressed.

        Raises:
            ValueError: the method cannot encode differences.
        """
        method = self.at(place, step)
        try:
            return None if method is None else differences.suited(method)
        except TypeError as error:
            raise ValueError(f"parameters cannot be compressed with {method}: {error}") from None


class Differences(_Encoded):
    """A server's side; arguments as of `Methods`."""

    def __init__(self, policy: Policy, variables: Sequence[Whole], shapes: Shapes) -> None:
        super().__init__(policy, variables, shapes)
        self._records: dict[int, _Record] = {}

    def forget(self, worker: int) -> None:
        """The next answer to a worker is whole.

        Args:
            worker: its number; may be unknown.
        """
        self._records.pop(worker, None)

    def answered(self, message: Push, values: Gradients) -> Answered:
        """The answer to a push.

        Args:
            message: the push.
            values: the parameters: whole ones, and rows of others.

        Raises:
            ValueError: a method cannot encode differences.
        """
        record = self._records.get(message.worker)
        if record is not None and message.sequence <= record.newest:
            kept = record.answers.get(message.sequence)  # without one, nobody waits for the answer any more
            return kept or Answered(values.kinds, values.arrays())
        if record is None or record.generation != message.generation:
            record = self._records[message.worker] = _Record(message.generation)
            found = self._whole(record, message, values)
        else:
            record.count += 1
            found = self._difference(record, message, values)
        record.newest = message.sequence
        record.answers[message.sequence] = found
        while len(record.answers) > _REMEMBERED:
            record.answers.popitem(last=False)
        return found

    def _whole(self, record: _Record, message: Push, values: Gradients) -> Answered:
        for place, array in self._dense(message, values).items():
            record.has[place] = differences.base(array)
        return Answered(values.kinds, values.arrays(), (record.generation, 0, message.sequence))

    def _difference(self, record: _Record, message: Push, values: Gradients) -> Answered:
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
        return Answered(
            kinds,
            [*self.shapes.layout(kinds).vectors(left), *sparse, *payloads.values()],
            (record.generation, record.count, message.sequence),
        )

    def _dense(self, message: Push, values: Gradients) -> dict[int, np.ndarray]:
        """By variable, the values of those that are compressed at times, and of which no rows are sent."""
        arrays = self.shapes.layout(values.kinds).arrays(values.vectors)
        return {place: one for place, one in arrays.items() if self.is_chosen(place) and place not in message.rows}


class Copies(_Encoded):
    """A worker's side, of one server; arguments as of `Methods`.

    Attributes:
        generation: raised when the next answer has to be whole.
    """

    def __init__(self, policy: Policy, variables: Sequence[Whole], shapes: Shapes) -> None:
        super().__init__(policy, variables, shapes)
        self.generation = 0
        self._count = -1
        self._has: dict[int, np.ndarray] = {}

    def forget(self) -> None:
        """The next answer has to be whole, as this worker has read others."""
        self.generation += 1

    def received(self, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], copy: Copy) -> Answered:
        """The parameters of an answer, without differences.

        Args:
            kinds: as of `Values`.
            arrays: of the message.
            copy: as of `Values`.

        Raises:
            ValueError: they do not fit the variables, or do not follow the last answer.
        """
        _, count, step = copy
        packed = [place for place, kind in enumerate(kinds) if kind == "packed"]
        cut = len(arrays) - len(packed)
        others: tuple[Kind, ...] = tuple("none" if kind == "packed" else kind for kind in kinds)
        plain = Gradients.received(others or ["dense"] * len(self.shapes.shapes), arrays[:cut], self.shapes)
        left = self.shapes.layout(plain.kinds).arrays(plain.vectors)
        if not count:
            self._has = {}
        elif count != self._count + 1:
            raise ValueError(f"difference {count} after difference {self._count}")
        self._count = count
        for place, array in left.items():
            if self.is_chosen(place):
                self._has[place] = differences.base(array)
        for place, payload in zip(packed, arrays[cut:], strict=True):
            method, has = self.difference_at(place, step), self._has.get(place)
            if method is None or has is None:
                raise ValueError("a difference where none is expected: all tasks need the same Gradients(parameters=…)")
            try:
                method.decode(payload, has, np.add)
            except Exception as error:  # of NumPy, for what a peer has sent
                raise ValueError(f"a difference cannot be decoded: {error}") from error
            left[place] = has.astype(self.shapes.dtypes[place]).reshape(self.shapes.shapes[place])
        whole: tuple[Kind, ...] = tuple("dense" if kind == "packed" else kind for kind in kinds) or plain.kinds
        found = [left.get(place) for place in range(len(whole))]
        given = Gradients(whole, self.shapes.layout(whole).vectors(found), plain.sparse)
        return Answered(whole, given.arrays(), copy)
