"""What a worker of a pipeline does: actions, and the notation for them."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

_NOTATION = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Kind(enum.Enum):
    """Of actions that compute."""

    FORWARD = "F"
    """Of a stage."""
    BACKWARD = "B"
    """Of a stage: gradients of its inputs and of its weights."""
    INPUTS = "I"
    """The half of `BACKWARD` that others wait for: gradients of the inputs."""
    WEIGHTS = "W"
    """The other half: gradients of the weights."""


class Action(NamedTuple):
    """What one stage computes of one micro-batch; written ``"2F0"`` for the forward pass of stage 2, micro-batch 0.

    The notation is that of `torch.distributed.pipelining`.

    Attributes:
        stage: counted from 0.
        kind: what is computed.
        micro_batch: counted from 0.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class Transfer(NamedTuple):
    """The results of an action on their way to another stage.

    They are activations, of a forward pass, or the gradients of activations.

    Attributes:
        result_of: the action.
        destination: the stage that takes them.
    """

    result_of: Action
    destination: int


class Exchange(NamedTuple):
    """What a worker exchanges with workers of other processes between two of its actions.

    Attributes:
        sent: results of the action before it.
        expected: what may come while this worker computes.
        received: what the action behind it waits for.
    """

    sent: tuple[Transfer, ...] = ()
    expected: tuple[Transfer, ...] = ()
    received: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        parts = zip(("→", "⇢", "⇒"), self, strict=True)
        return " ".join(f"{one.result_of}{arrow}{one.destination}" for arrow, part in parts for one in part)


Step = Action | Exchange
"""One of a worker's steps."""


def parse(text: str) -> Action:
    """Reads the notation of an action.

    Args:
        text: such as ``"0F3"``.

    Raises:
        ValueError: it is not an action.
    """
    found = _NOTATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"expected an action such as '0F3': the stage, then F (forward), B (backward), I (backward of the inputs) "
            f"or W (backward of the weights), then the micro-batch; got {text!r}"
        )
    stage, kind, micro_batch = found.groups()
    return Action(int(stage), Kind(kind), int(micro_batch))
