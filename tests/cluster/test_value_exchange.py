"""The server's bookkeeping of what tasks exchange, without connections."""

import pytest

from tfdist.cluster.messages import GatherValues, GetValue, PublishValue, Reply
from tfdist.cluster.value_exchange import ValueExchange


class Told:
    """Meetings, and the replies to each task."""

    def __init__(self):
        self.replies = []
        self.meetings = ValueExchange(lambda task, reply: self.replies.append((task, reply)))

    def gather(self, task, value=None, tasks=(0, 2), name="name", request=1):
        return self.meetings.gather(task, GatherValues(request, name, tasks, value))

    def get(self, task, key, wait=True):
        self.meetings.get(task, GetValue(1, key, wait))

    def put(self, task, key, value):
        self.meetings.put(task, PublishValue(key, value))


@pytest.fixture
def told():
    return Told()


def test_a_gather_lists_the_values_in_the_order_of_its_tasks(told):
    assert not told.gather(0, "of 0", (2, 0))
    assert told.replies == []
    assert told.gather(2, "of 2", (2, 0), request=7)
    assert dict(told.replies) == {0: Reply(1, ["of 2", "of 0"]), 2: Reply(7, ["of 2", "of 0"])}


def test_gathers_are_known_by_their_name_and_tasks(told):
    told.gather(0, "a", (0, 1))
    told.gather(0, "b", (0, 2))
    told.gather(0, "c", (0, 2), name="other")
    assert told.gather(2, "d", (0, 2))
    assert [reply.value for _, reply in told.replies] == [["b", "d"]] * 2


def test_a_name_can_be_used_again(told):
    for value in range(3):
        told.gather(0, value)
        assert told.gather(2, value)
        assert told.replies[-1] == (2, Reply(1, [value, value]))


def test_returning_task_replaces_its_gathered_value(told):
    told.gather(0, "of the one that died")
    told.meetings.lost(0, None)
    told.gather(2, "of 2")
    assert told.replies == [], "the others wait for it"
    told.meetings.returned(0)
    assert told.gather(0, "of the next one")
    assert told.replies[-1][1].value == ["of the next one", "of 2"]


def test_gather_with_a_lost_task_replies_with_an_error(told):
    told.gather(0)
    told.gather(1, tasks=(1, 3))
    told.meetings.lost(2, "task 2 failed")
    assert told.replies == [(0, Reply(1, error="task 2 failed"))]
    told.gather(0, request=2)
    assert told.replies[1:] == [(0, Reply(2, error="task 2 failed"))], "at once, as long as it is not back"
    told.meetings.returned(2)
    told.gather(0, "a")
    assert told.gather(2, "b")


def test_get_returns_stored_value_or_none(told):
    told.get(1, "card", wait=False)
    told.put(0, "card", "of 0")
    told.get(1, "card", wait=False)
    told.get(1, "card")
    assert [reply.value for _, reply in told.replies] == [None, "of 0", "of 0"]


def test_a_get_waits_for_its_value(told):
    told.get(1, "address")
    told.get(2, "address")
    told.put(0, "another", "x")
    assert told.replies == []
    told.put(0, "address", "tcp://host:1")
    assert told.replies == [(1, Reply(1, "tcp://host:1")), (2, Reply(1, "tcp://host:1"))]


def test_values_and_requests_of_a_lost_task_are_dropped(told):
    told.put(0, "address", "old")
    told.put(1, "other", "x")
    told.get(2, "nothing yet")
    told.meetings.lost(0, None)
    told.meetings.lost(2, None)
    told.get(1, "address")
    told.put(1, "nothing yet", "y")
    assert told.replies == [], "1 waits for the new address, and 2 is not there"
    told.put(0, "address", "new")
    assert told.replies == [(1, Reply(1, "new"))]
    told.get(0, "other")
    assert told.replies[-1] == (0, Reply(1, "x"))


@pytest.mark.parametrize(("task", "tasks"), [(2, (0, 1)), (0, (0, 0)), (0, ())])
def test_gather_with_invalid_tasks_replies_with_an_error(told, task, tasks):
    assert not told.gather(task, 1, tasks)
    ((_, reply),) = told.replies
    assert f"must list the task itself, and each task once; got {list(tasks)}" in reply.error
