"""Which store keeps the values of a shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import Hogwild
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.store import Store

NewStore = Callable[[Sequence[HeldRows], TrainingState, dict[str, Any]], Store | MemoryStore]
"""Function that makes a store from the descriptions of variables, their state and the serialized optimizer."""


def new_store_of(arguments: Arguments) -> NewStore:
    """Returns the function that makes the store of a shard that takes what workers push.

    Args:
        arguments: the strategy's arguments.
    """
    if isinstance(arguments.pushes, Hogwild):
        return MemoryStore
    return functools.partial(Store, is_lazy=arguments.is_lazy)
