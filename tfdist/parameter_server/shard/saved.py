"""What a shard writes to its snapshots, and takes over from one when its server is started again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tfdist.parameter_server.protocol.state import (
    ShardProgress,
    TrainingState,
    rows_of_sequences,
    sequences_of_rows,
)
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState

if TYPE_CHECKING:
    from tfdist.parameter_server.shard.shard import Shard


def progress_of(shard: Shard) -> ShardProgress:
    """Returns what a shard has counted and applied, without the pushes that wait.

    Args:
        shard: the shard.
    """
    waiting = Counter(gradient.worker for gradient in shard.ledger.waiting)
    counted, applied = dict(shard.ledger.counted - waiting), rows_of_sequences(shard.applied)
    return ShardProgress(shard.ledger.version, counted, applied, shard.assigned.version)


def take_over(shard: Shard, progress: ShardProgress) -> None:
    """Has a shard take over what was counted and applied; pushes that were not applied have to come again.

    Args:
        shard: a shard without pushes.
        progress: the progress of an earlier one.
    """
    shard.ledger.version, shard.assigned.version = progress.version, progress.assigned
    shard.ledger.counted = Counter(progress.counted)
    applied = sequences_of_rows(progress.applied)
    shard.sequences |= applied
    shard.applied |= applied


def state_of(shard: Shard) -> ShardState:
    """Returns all applied updates, and what they are of.

    Args:
        shard: a shard with a store, whose updates are counted.
    """
    assert shard.store is not None
    state = shard.store.state()
    parts = tuple(
        PartState(held.path, held.begin, held.end, held.rows, value, dict(slots))
        for held, value, slots in zip(shard.store.held, state.values, state.slots, strict=True)
    )
    waiting = [(push.source[0], push.ticket) for push in shard.pushed.values() if push.ticket is not None]
    books = shard.tickets.books(waiting)
    return ShardState(shard.model, shard.store.config, dict(state.scalars), parts, progress_of(shard), books)


def restored(shard: Shard, snapshot: ShardState) -> TrainingState:
    """Has a shard take over the progress in a snapshot, and returns the values in it.

    Args:
        shard: a shard without pushes, which workers may have entered.
        snapshot: what `state_of` returned for an earlier one.
    """
    take_over(shard, snapshot.progress)
    for worker, incarnation in shard.incarnations.items():
        record = shard.ledger.workers[worker]
        record.sequence = max(record.sequence, shard.sequences.get((worker, incarnation), -1))
    parts = snapshot.parts
    return TrainingState([part.value for part in parts], [part.slots for part in parts], snapshot.scalars)
