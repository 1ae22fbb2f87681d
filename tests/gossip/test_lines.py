import numpy as np
import pytest

from tests.gossip.conftest import until
from tfdist.cluster.settings import Timeouts
from tfdist.comm.local import LocalWorld
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import PeerLostError
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import GossipMessage, MessageKind


def test_messages_arrive_in_their_order(ranks):
    """More of them than move at once, of different sizes, in both directions, and of two optimizers."""

    def work(group):
        values = []
        lines = [MessageChannels(group, name) for name in ("a", "b")]
        other = 1 - group.rank
        for number in range(12):
            for place, line in enumerate(lines):
                line.send(
                    other, GossipMessage(MessageKind.WEIGHTS, number, place, [np.full(10 ** (number % 5), group.rank)])
                )
        for number in range(12):
            for place, line in enumerate(lines):
                message = line.await_next(other)
                assert (message.round, message.generation) == (number, place)
                assert len(message.parts[0].view(np.int64)) == 10 ** (number % 5)
                values.append(message.parts[0].view(np.int64)[-1].item())
        return set(values)

    assert ranks(2)(work) == [{1}, {0}]


def test_groups_have_separate_channels(ranks):
    """Between the same two processes, and of optimizers of the same name."""

    def work(group):
        if group.rank == 2:
            return None
        pair, other = group.subgroup((0, 1)), 1 - group.rank
        whole, part = MessageChannels(group, "a"), MessageChannels(pair, "a")
        whole.send(other, GossipMessage(MessageKind.WEIGHTS, 1))
        part.send(other, GossipMessage(MessageKind.WEIGHTS, 2))
        return part.await_next(other).round, whole.await_next(other).round

    assert ranks(3)(work) == [(2, 1), (2, 1), None]


def test_arrived_returns_none_until_message_comes(ranks):
    def work(group):
        lines = MessageChannels(group, "a")
        if group.rank == 0:
            assert lines.arrived(1) is None
            lines.send(1, GossipMessage(MessageKind.REQUEST))
            return until(lambda: lines.arrived(1)).kind
        assert lines.await_next(0).kind == MessageKind.REQUEST
        lines.send(0, GossipMessage(MessageKind.DECLINED))
        return None

    assert ranks(2)(work)[0] == MessageKind.DECLINED


def test_arrived_raises_after_any_neighbour_is_lost():
    engine = Engine(LocalWorld(3).communicator(0), None, Timeouts())
    lines = MessageChannels(ProcessGroup(engine), "a")
    assert lines.arrived(1) is None
    assert lines.arrived(2) is None
    assert engine.survives(2, PeerLostError("rank 2 died"))
    for rank in (1, 2):
        with pytest.raises(PeerLostError, match="rank 2 died"):
            lines.arrived(rank)
