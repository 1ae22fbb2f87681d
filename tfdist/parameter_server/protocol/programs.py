"""Checks whether all workers begin the same models, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tfdist.parameter_server.protocol.messages import Attach, CompareState

CHIEF = 0
"""Number of the chief's task."""


Begun = Attach | CompareState
"""Message of a worker that begins a model, or compares its weights."""


@dataclass
class Program:
    """The models that a worker has begun.

    Attributes:
        incarnation: random number of the worker's process.
        is_first: whether this is the first process of its task here. A process that comes again may leave models out.
        models: by place, the message that began the model.
    """

    incarnation: int
    is_first: bool
    models: dict[int, Begun] = field(default_factory=dict)


class Programs:
    """The programs of all workers.

    Args:
        chief: number of the worker that others are compared with; None compares nothing.

    Attributes:
        of: program of each worker, by number.
    """

    def __init__(self, chief: int | None = CHIEF) -> None:
        self._chief = chief
        self.of: dict[int, Program] = {}

    def note(self, begun: Begun) -> Program:
        """Notes that a worker has begun a model.

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
        """Compares models with the chief's, at the place of a message that was noted.

        Returns:
            The messages that began a model other than the chief's, each with an explanation. Only the sender's model is
            compared; if the chief is the sender, those of all workers are.
        """
        chief = None if self._chief is None else self.of.get(self._chief)
        if chief is None:
            return []
        others = self.of if begun.worker == self._chief else [begun.worker]
        differing = []
        for worker in others:
            message = self.of[worker].models.get(begun.place)
            if message is not None and (why := _difference(chief, self.of[worker], begun.place)) is not None:
                differing.append((message, why))
        return differing


def _difference(chief: Program, program: Program, place: int) -> str | None:
    """Explains how a model differs from the chief's at the same place; None if it does not, or if that is unknown."""
    expected, begun = chief.models.get(place), program.models[place]
    if expected is None or not (chief.is_first and program.is_first):
        return None
    rest = (
        "Every task must build the same models with the same optimizers, and train them in the same order, with the "
        "same number of parameter servers."
    )
    if expected.model == begun.model:
        for of_chief, option in zip(_options(expected), _options(begun), strict=False):
            if of_chief != option:
                return f"another optimizer than the chief's: {_quoted(option)}, the chief's {_quoted(of_chief)}. {rest}"
        return None
    for number, (of_chief, variable) in enumerate(
        zip_longest(expected.variables, begun.variables, fillvalue="none"), 1
    ):
        if of_chief != variable:
            return (
                f"another model than the chief's: variable {number} is {_quoted(variable)}, the chief's is "
                f"{_quoted(of_chief)}. {rest}"
            )
    return f"this task trains the model {_quoted(begun.model)}, but the chief trains {_quoted(expected.model)}. {rest}"


def _options(begun: Begun) -> tuple[str, ...]:
    return begun.options if isinstance(begun, Attach) else ()


def _quoted(text: Sequence[str]) -> str:
    """Returns a peer's text, cut to 200 characters."""
    return str(text)[:200]
