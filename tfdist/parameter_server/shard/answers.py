"""What a shard answers: whole values, or those that are newer than a worker's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.parameter_server.protocol.messages import PullKind, Push, Values
from tfdist.parameter_server.shard.assignments import Assignments
from tfdist.parameter_server.shard.feature import ShardFeature
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.store import Store


def whole(
    store: Store | MemoryStore, version: int, assigned: Assignments, id: int, what: PullKind, clock: int
) -> tuple[Values, list[np.ndarray]]:
    """Returns the answer to a pull or a read.

    Args:
        store: the values.
        version: their version.
        assigned: the last assignments to the variables.
        id: number of the request.
        what: what is requested.
        clock: number of the worker's steps.
    """
    slots: tuple[tuple[str, ...], ...] = ()
    scalars: tuple[str, ...] = ()
    if what == "averages" or (what == "final" and version != assigned.version):
        arrays = store.averages() or store.vectors()
    elif what == "state":
        state = store.state()
        (slots, scalars), arrays = state.names(), state.arrays()
    else:
        arrays = store.since().arrays()
    return Values(id, version, store.iterations, clock, slots, scalars, edition=store.edition), arrays


def newer(
    store: Store | MemoryStore, version: int, features: Sequence[ShardFeature], message: Push, clock: int
) -> tuple[Values, list[np.ndarray]]:
    """Returns the answer to a push: the values that are newer than the worker's.

    Args:
        store: the values.
        version: their version.
        features: features that may encode them.
        message: the push.
        clock: number of the worker's steps.
    """
    found = store.since(message.has.edition, message.has.rows)
    kinds, arrays, copy = found.kinds if found.sparse else (), found.arrays(), None
    for feature in features:
        if (encoded := feature.encoded(message, found)) is not None:
            kinds, arrays, copy = encoded.kinds, encoded.arrays, encoded.copy
    counts = message.id, version, store.iterations, clock
    return Values(*counts, edition=store.edition, kinds=kinds, copy=copy), arrays
