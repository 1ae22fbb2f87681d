"""Copies a leader's whole state into entries of its log, and restores it on the follower."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.state import TrainingState, rows_of_sequences, sequences_of_rows
from tfdist.parameter_server.server.replication_messages import (
    DealsCopy,
    LedgerState,
    PendingGradients,
    ProgramsCopy,
    ShardCopy,
    StatesCopy,
    TableCopy,
)
from tfdist.parameter_server.server.shards import Key, Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.saved import progress_of, take_over
from tfdist.parameter_server.shard.shard import PendingPush, Shard
from tfdist.parameter_server.tables.round import Round
from tfdist.parameter_server.tables.table import EmbeddingTable
from tfdist.parameter_server.tables.tables import Sender, ServedTable, placeholder
from tfdist.parameter_server.worker.layer_states import LayerStateStore

Append = Callable[..., None]
"""Appends an entry; see `tfdist.parameter_server.server.log.ReplicationLog.append`."""


def append_all(append: Append, shards: Shards) -> None:
    """Appends copies of the leader's whole state.

    Args:
        append: function that appends an entry to the log.
        shards: the leader's shards.
    """
    append_programs(append, shards)
    append_states(append, shards.states)
    if shards.deals is not None:
        append_deals(append, shards.deals)
    for key in shards.models():
        append_shard(append, key, shards[key])
    for name in shards.tables.names():
        append_table(append, shards.tables.served(name))


def append_shard(append: Append, key: Key, shard: Shard) -> None:
    """Appends a copy of a shard.

    Args:
        append: function that appends an entry to the log.
        key: name and occurrence of the shard's model.
        shard: the leader's shard.
    """
    state = TrainingState([]) if shard.store is None else shard.store.state()
    slots, scalars = state.names()
    pushed = [shard.pushed[id(push)] for push in shard.ledger.waiting]
    waiting = tuple(
        PendingGradients(gradient, push.source[1], push.read, push.ticket, push.gradients.kinds)
        for gradient, push in zip(shard.ledger.waiting, pushed, strict=True)
    )
    append(
        ShardCopy,
        *key,
        () if shard.store is None else tuple(shard.store.held),
        {} if shard.store is None else shard.store.config,
        slots,
        scalars,
        progress_of(shard),
        _ledger_state(shard.ledger),
        dict(shard.incarnations),
        rows_of_sequences(shard.sequences),
        dict(shard.tickets.decisions),
        dict(shard.assigned.puts),
        waiting,
        arrays=[*state.arrays(), *(array for push in pushed for array in push.gradients.arrays())],
    )


def put_shard(shards: Shards, copy: ShardCopy, arrays: list[np.ndarray]) -> None:
    """Replaces a shard of the follower by a copy of the leader's.

    Args:
        shards: the follower's shards.
        copy: copy of the leader's shard.
        arrays: arrays of the copy.
    """
    shard = shards.put((copy.model, copy.occurrence))
    cut = len(copy.held) + sum(map(len, copy.slots)) + len(copy.scalars)
    if copy.held:
        shard.make_store(
            copy.held,
            copy.optimizer,
            TrainingState.of_arrays(arrays[:cut], len(copy.held), copy.slots, copy.scalars),
        )
    take_over(shard, copy.progress)
    ledger, copied = shard.ledger, copy.ledger
    ledger.awaited, ledger.idle = set(copied.awaited), frozenset(copied.idle)
    ledger.workers, ledger.round = copied.workers, copied.round
    ledger.done.extend(copied.done)
    ledger.dropped.update(copied.dropped)
    ledger.staleness.update(copied.staleness)
    shard.incarnations, shard.tickets.decisions, shard.assigned.puts = copy.incarnations, copy.decisions, copy.puts
    shard.sequences = sequences_of_rows(copy.sequences)
    rest = iter(arrays[cut:])
    for pending in copy.waiting:
        assert shard.store is not None
        layout = shard.store.shapes.layout(pending.kinds)
        gradient_arrays = [next(rest) for _ in range(len(layout.dtypes) + 2 * pending.kinds.count("sparse"))]
        gradients = PushedGradients.received(pending.kinds, gradient_arrays, shard.store.shapes)
        ledger.waiting.append(pending.gradient)
        ledger.counted[pending.gradient.worker] += 1
        source = pending.gradient.worker, pending.incarnation
        shard.pushed[id(pending.gradient)] = PendingPush(source, pending.read, gradients, pending.ticket)


def append_programs(append: Append, shards: Shards) -> None:
    """Appends the models that workers have begun, and which workers are attached or gone.

    Args:
        append: function that appends an entry to the log.
        shards: the leader's shards.
    """
    peers = tuple((peer, worker, key) for peer, (worker, key) in shards.peers.items())
    gone_on = tuple((key, tuple(workers)) for key, workers in shards.gone_on.items())
    append(ProgramsCopy, peers, dict(shards.programs.of), gone_on, tuple(shards.over), tuple(shards.absent))


def put_programs(shards: Shards, copy: ProgramsCopy, named: Callable[[bytes], bytes]) -> None:
    """Takes over the models that workers have begun, and which workers are attached or gone.

    Args:
        shards: the follower's shards.
        copy: copy of the leader's bookkeeping.
        named: function that returns the follower's name of a connection of the leader.
    """
    shards.peers = {named(peer): (worker, key) for peer, worker, key in copy.peers}
    shards.programs.of = copy.programs
    shards.gone_on = {key: set(workers) for key, workers in copy.gone_on}
    shards.over, shards.absent = set(copy.over), set(copy.absent)
    shards.tables.ended = set(copy.absent)


def append_states(append: Append, states: LayerStateStore) -> None:
    """Appends the chief's weights that no server updates.

    Args:
        append: function that appends an entry to the log.
        states: the leader's copy of these weights.
    """
    digests = tuple(states.digests.items())
    append(StatesCopy, dict(states.programs.of), digests, tuple(states.arrays), arrays=list(states.arrays.values()))


def put_states(shards: Shards, copy: StatesCopy, arrays: list[np.ndarray]) -> None:
    """Replaces the follower's copy of the chief's weights; arguments as in `put_shard`."""
    shards.states.programs.of = copy.programs
    shards.states.digests = dict(copy.digests)
    shards.states.arrays = dict(zip(copy.arrays, arrays, strict=True))


def append_table(append: Append, served: ServedTable) -> None:
    """Appends a copy of a table.

    Args:
        append: function that appends an entry to the log.
        served: the leader's table with its bookkeeping.
    """
    state = served.table.state()
    senders = tuple(
        (worker, sender.incarnation, sender.looked_up, sender.updated) for worker, sender in served.senders.items()
    )
    append(
        TableCopy,
        served.described,
        served.optimizer,
        tuple(state),
        senders,
        rows_of_sequences(served.sequences),
        arrays=list(state.values()),
    )


def put_table(shards: Shards, copy: TableCopy, arrays: list[np.ndarray]) -> None:
    """Replaces a table of the follower by a copy of the leader's; arguments as in `put_shard`."""
    described = copy.described
    optimizer = deepcopy(copy.optimizer or placeholder())  # Keras changes the dictionary that it deserializes
    table = EmbeddingTable(described.dim, optimizer, described.initial, described.policy, described.dtype)
    table.restore([dict(zip(copy.names, arrays, strict=True))])
    senders = {worker: Sender(*sequences) for worker, *sequences in copy.senders}
    together = Round(range(described.workers)) if described.workers else None  # workers send waiting parts again
    shards.tables.put(
        ServedTable(described, table, copy.optimizer, None, senders, sequences_of_rows(copy.sequences), round=together)
    )


def append_deals(append: Append, deals: DealerService) -> None:
    """Appends the dealer's state. The leader's dealer restarts too: workers have to begin their epochs again.

    Args:
        append: function that appends an entry to the log.
        deals: the leader's dealer.
    """
    state = deals.state(())
    append(DealsCopy, state, deals.restart(state))


def put_deals(shards: Shards, copy: DealsCopy) -> None:
    """Replaces the state of the follower's dealer; arguments as in `put_shard`."""
    if shards.deals is not None:
        shards.deals.restart(copy.state, copy.first_ticket)


def _ledger_state(ledger: Ledger) -> LedgerState:
    return LedgerState(
        tuple(ledger.awaited),
        tuple(ledger.idle),
        dict(ledger.workers),
        ledger.round,
        tuple(ledger.done),
        dict(ledger.dropped),
        dict(ledger.staleness),
    )
