"""Whether all workers begin the same models, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tfdist.parameter_server.protocol.messages import Attach, GiveState

CHIEF = 0
"""The chief's number."""


Begun = Attach | GiveState
"""A worker's message when it begins a model, or compares its weights."""


@dataclass
class Program:
    """The models that a worker has begun.

    Attributes:
        incarnation: of its process.
        is_first: whether no other process of this task has been here: one that comes again may leave models out.
        models: by place, each one's first message.
    """

    incarnation: int
    is_first: bool
    models: dict[int, Begun] = field(default_factory=dict)


class Programs:
    """The programs of all workers.

    Args:
        chief: number of the one that others are compared with; None for no comparison.

    Attributes:
        of: each worker's, by number.
    """

    def __init__(self, chief: int | None = CHIEF) -> None:
        self._chief = chief
        self.of: dict[int, Program] = {}

    def note(self, begun: Begun) -> Program:
        """Notes that a worker begins a model.

        Returns:
            The worker's program.
        """
        program, process = self.of.get(begun.worker), begun.incarnation
        if isinstance(begun, Attach) and begun.program:
            process = begun.program
        if program is None or program.incarnation != process:
            program = self.of[begun.worker] = Program(process, program is None)
        program.models[begun.place] = begun
        return program

    def differences(self, begun: Begun) -> list[tuple[Begun, str]]:
        """What differs from the chief's program at the place of a message that was noted.

        Returns:
            The messages of workers whose model is another one, each with an explanation: that of the sender; if the
            chief is the sender, those of all others.
        """
        chief = None if self._chief is None else self.of.get(self._chief)
        if chief is None:
            return []
        others = self.of if begun.worker == self._chief else [begun.worker]
        found = []
        for worker in others:
            own = self.of[worker].models.get(begun.place)
            if own is not None and (why := _difference(chief, self.of[worker], begun.place)) is not None:
                found.append((own, why))
        return found


def _difference(chief: Program, program: Program, place: int) -> str | None:
    """How a model differs from the chief's at the same place; None if it does not, or if that cannot be told."""
    expected, own = chief.models.get(place), program.models[place]
    if expected is None or expected.model == own.model or not (chief.is_first and program.is_first):
        return None
    rest = (
        "Every task must build the same models with the same optimizers, and train them in the same order, with the "
        "same number of parameter servers."
    )
    for number, (of_chief, one) in enumerate(zip_longest(expected.variables, own.variables, fillvalue="none"), 1):
        if of_chief != one:
            return f"another model: variable {number} is {_quoted(one)}, the chief's is {_quoted(of_chief)}. {rest}"
    return f"the model {_quoted(own.model)}, but the chief trains {_quoted(expected.model)}. {rest}"


def _quoted(text: Sequence[str]) -> str:
    """A peer's text, cut."""
    return str(text)[:200]
