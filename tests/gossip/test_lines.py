import numpy as np

from tests.gossip.conftest import until
from tfdist.gossip.lines import Lines
from tfdist.gossip.messages import Kind, Message


def test_messages_arrive_in_their_order(ranks):
    """More of them than move at once, of different sizes, in both directions, and of two optimizers."""

    def work(group):
        found = []
        lines = [Lines(group, name) for name in ("a", "b")]
        other = 1 - group.rank
        for number in range(12):
            for place, line in enumerate(lines):
                line.send(other, Message(Kind.WEIGHTS, number, place, [np.full(10 ** (number % 5), group.rank)]))
        for number in range(12):
            for place, line in enumerate(lines):
                message = line.await_next(other)
                assert (message.round, message.generation) == (number, place)
                assert len(message.parts[0].view(np.int64)) == 10 ** (number % 5)
                found.append(message.parts[0].view(np.int64)[-1].item())
        return set(found)

    assert ranks(2)(work) == [{1}, {0}]


def test_nothing_is_there_before_it_has_come(ranks):
    def work(group):
        lines = Lines(group, "a")
        if group.rank == 0:
            assert lines.arrived(1) is None
            lines.send(1, Message(Kind.REQUEST))
            return until(lambda: lines.arrived(1)).kind
        assert lines.await_next(0, blocking=True).kind == Kind.REQUEST
        lines.send(0, Message(Kind.DECLINED))
        return None

    assert ranks(2)(work)[0] == Kind.DECLINED
