"""Parameters that are sent as compressed differences from the parameters that a worker has: the server's side.

`tfdist.parameter_server.protocol.differences` describes them, and has the worker's side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.compression import differences
from tfdist.compression.policy import Policy
from tfdist.compression.state import State
from tfdist.parameter_server.protocol.differences import DifferenceMethods, EncodedAnswer
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import Push
from tfdist.parameter_server.protocol.packing import Packed, VariableSpec
from tfdist.parameter_server.shard.feature import ShardFeature

_REMEMBERED = 2
"""Number of answers to a worker that are kept for repeated pushes: as many as it may wait for."""


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


class CompressedAnswers(ShardFeature):
    """Answers whose parameters are encoded as differences from what each worker has.

    Args:
        policy: choice of the method for each variable.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._records: dict[int, _WorkerCopy] = {}

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Chooses the methods for the variables; see `ShardFeature`."""
        self._methods = DifferenceMethods(self._policy, variables, shapes)

    def attached(self, worker: int) -> None:
        """Makes the next answer to a worker whole, as it may lack an earlier one."""
        self.forget(worker)

    def forget(self, worker: int) -> None:
        """Makes the next answer to a worker whole.

        Args:
            worker: number of the worker; may be unknown.
        """
        self._records.pop(worker, None)

    def encoded(self, message: Push, values: PushedGradients) -> EncodedAnswer:
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
            method, has = self._methods.difference_at(place, message.sequence), record.has.get(place)
            if method is None or has is None:
                record.has[place] = differences.base(array)
                continue
            state = record.states.setdefault(place, State(f"{place}", seed=message.worker, shape=array.shape))
            payload = differences.advance(method, array, has, state)
            if payload is None:
                record.has[place] = differences.base(array)
            else:
                payloads[place] = payload
        packed = Packed.instead(values, payloads, self._methods.shapes)
        return EncodedAnswer(packed.kinds, packed.arrays(), (record.generation, record.count, message.sequence))

    def _dense(self, message: Push, values: PushedGradients) -> dict[int, np.ndarray]:
        """Returns, by variable, the values of those that may be compressed and of which the worker takes no rows."""
        arrays = self._methods.shapes.layout(values.kinds).arrays(values.vectors)
        return {
            place: array
            for place, array in arrays.items()
            if self._methods.is_chosen(place) and place not in message.has.rows
        }
