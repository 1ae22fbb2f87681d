"""The actions of a pipeline's workers, and the notation for them."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

_NOTATION = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class ActionKind(enum.Enum):
    """Kinds of computing actions."""

    FORWARD = "F"
    """Forward pass of a stage."""
    BACKWARD = "B"
    """Backward pass of a stage: gradients of its inputs and of its weights."""
    INPUTS = "I"
    """The half of `BACKWARD` that earlier stages wait for: gradients of the inputs."""
    WEIGHTS = "W"
    """The other half of `BACKWARD`: gradients of the weights."""


class Action(NamedTuple):
    """The computation of one stage on one micro-batch; ``"2F0"`` is the forward pass of stage 2 on micro-batch 0.

    The notation is that of `torch.distributed.pipelining`.

    Attributes:
        stage: number of the stage, from 0.
        kind: kind of computation.
        micro_batch: number of the micro-batch, from 0.
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class Transfer(NamedTuple):
    """The results of an action on their way to another stage.

    They are the activations of a forward pass, or gradients of activations.

    Attributes:
        result_of: the action that made the results.
        destination: number of the stage that takes the results.
    """

    result_of: Action
    destination: int


class WorkerExchange(NamedTuple):
    """One exchange of a worker with workers of other processes, between two of its actions.

    Attributes:
        sent: results of the action before the exchange.
        expected: results that may arrive while the worker computes.
        received: results that the action after the exchange waits for.
    """

    sent: tuple[Transfer, ...] = ()
    expected: tuple[Transfer, ...] = ()
    received: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        parts = zip(("→", "⇢", "⇒"), self, strict=True)
        return " ".join(
            f"{transfer.result_of}{arrow}{transfer.destination}" for arrow, part in parts for transfer in part
        )


Step = Action | WorkerExchange
"""An entry in a worker's sequence: an action or an exchange."""


def parse(text: str) -> Action:
    """Reads the notation of an action.

    Args:
        text: notation of an action, such as ``"0F3"``.

    Raises:
        ValueError: ``text`` is not the notation of an action.
    """
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"expected an action such as '0F3': the stage, then F (forward), B (backward), I (backward of the inputs) "
            f"or W (backward of the weights), then the micro-batch; got {text!r}"
        )
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), ActionKind(kind), int(micro_batch))
