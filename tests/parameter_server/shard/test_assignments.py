"""Which assignments a shard remembers; `test_shard.py` and `server/test_copies.py` show what follows."""

from tfdist.parameter_server.protocol.messages import AssignValues
from tfdist.parameter_server.shard.assignments import Assignments


def test_the_last_assignment_has_its_version():
    assigned = Assignments()
    assert assigned.version == -1
    assigned.note(AssignValues(3, 0, 1), version=7)
    assert assigned.version == 7


def test_message_is_a_duplicate_for_the_same_process_only():
    assigned = Assignments()
    assert not assigned.is_duplicate(AssignValues(0, 0, 1))
    assigned.note(AssignValues(3, 0, 1), version=0)
    assert [assigned.is_duplicate(AssignValues(id, 0, 1)) for id in (2, 3, 4)] == [True, True, False]
    assert not assigned.is_duplicate(AssignValues(3, 0, 2)), "a restarted worker numbers its messages from 0"
    assert not assigned.is_duplicate(AssignValues(3, 1, 1)), "another worker"
