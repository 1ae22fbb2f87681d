"""The parts of one update."""

import numpy as np

from tfdist.parameter_server.protocol.tables import UpdateRows
from tfdist.parameter_server.tables.round import Round, TableUpdatePart


def part(worker, id=0):
    keys, gradients = np.array([worker], np.int64), np.ones((1, 2), np.float32)
    return TableUpdatePart(UpdateRows(id, worker, 1, "users", 0), keys, gradients, lambda answer, arrays: None)


def test_parts_are_awaited_and_ordered_by_worker():
    update = Round(range(3))
    assert update.awaited == (0, 1, 2)
    assert not update.add(part(2))
    assert not update.add(part(0))
    assert update.awaited == (1,)
    assert update.add(part(2, id=5)), "again"
    update.add(part(1))
    assert update.awaited == ()
    assert [(taken.message.worker, taken.message.id) for taken in update.take()] == [(0, 0), (1, 0), (2, 5)]
    assert update.awaited == (0, 1, 2), "the next update begins"


def test_forgotten_part_is_awaited_again():
    update = Round(range(2))
    update.add(part(1))
    update.forget(1)
    update.forget(0)
    assert update.awaited == (0, 1)
    assert update.take() == []
