"""The tables of a server, message by message."""

import keras
import numpy as np
import pytest

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.messages import Done, Refused, Waiting
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    UpdateRows,
)
from tfdist.parameter_server.tables.tables import Tables

DIM = 2
ZERO = InitialRows(scale=0.0)
SGD = keras.optimizers.serialize(keras.optimizers.SGD(1.0))
KEYS = np.array([3, -5], np.int64)
ONES = np.ones((2, DIM), np.float32)


def ask(tables, kind, *arguments, arrays=(), worker=0, incarnation=1):
    answers = []
    message = kind(7, worker, incarnation, "users", *arguments)
    tables.heard(message, list(arrays), lambda answer, rows: answers.append((answer, rows)))
    ((answer, rows),) = answers
    assert answer.id == 7
    return answer, rows


def attach(
    tables,
    optimizer=SGD,
    worker=0,
    incarnation=1,
    initial=ZERO,
    policy=RowPolicy(),  # noqa: B008
    workers=0,
):
    form = DIM, "float32", initial, policy
    return ask(tables, AttachTable, *form, optimizer, workers, worker=worker, incarnation=incarnation)[0]


def update(tables, sequence, rate=None, arrays=(KEYS, ONES), **sender):
    return ask(tables, UpdateRows, sequence, rate, arrays=arrays, **sender)[0]


def assign(tables, number, only_if_new, value, incarnation=1):
    message = AssignRows(number, 0, incarnation, "users", only_if_new)
    answers = []
    tables.heard(message, [KEYS, np.float32(value) * ONES], lambda answer, rows: answers.append(answer))
    return answers[0]


def lookup(tables, sequence=0, create=True, keys=KEYS, **sender):
    return ask(tables, Lookup, sequence, create, arrays=[keys], **sender)


def values(tables, **sender):
    return lookup(tables, create=False, **sender)[1][0][:, 0].tolist()


def attached(**options):
    tables = Tables()
    assert isinstance(attach(tables, **options), TableAttached)
    return tables


def test_rows_are_made_updated_and_exported():
    tables = attached()
    lookup(tables)
    assert update(tables, 0) == Done(7, 1)
    answer, (keys, rows) = ask(tables, ExportTable)
    assert answer == Rows(7, 1)
    np.testing.assert_array_equal(keys, [-5, 3])
    np.testing.assert_array_equal(rows, -ONES)


def test_repeated_update_counts_once():
    tables = attached()
    lookup(tables)
    for sequence in (0, 0, 1, 1, 0):
        assert isinstance(update(tables, sequence), Done)
    assert values(tables) == [-2, -2]
    attach(tables, worker=1)
    update(tables, 0, worker=1)
    assert values(tables) == [-3, -3], "another worker's"
    attach(tables, incarnation=2)
    update(tables, 0, incarnation=2)
    assert values(tables, incarnation=2) == [-4, -4], "a worker that came again"


def test_repeated_lookup_counts_as_one_use():
    tables = attached(policy=RowPolicy(admit_after=2))
    for _ in range(3):
        lookup(tables, sequence=0)
    assert not len(ask(tables, ExportTable)[1][0])
    lookup(tables, sequence=1)
    assert len(ask(tables, ExportTable)[1][0]) == 2


def test_the_chiefs_learning_rate_is_used():
    tables = attached()
    lookup(tables)
    update(tables, 0, rate=0.5)
    update(tables, 1)
    assert values(tables) == [-1, -1]


def test_worker_without_attach_is_unknown():
    tables = Tables()
    assert lookup(tables)[0].is_unknown
    attach(tables)
    assert lookup(tables, worker=1)[0].is_unknown
    assert lookup(tables, incarnation=2)[0].is_unknown
    assert isinstance(lookup(tables)[0], Rows)


@pytest.mark.parametrize(
    ("kind", "arguments", "arrays", "why"),
    [
        (Lookup, (0, True), [KEYS.astype(np.int32)], "int64"),
        (Lookup, (0, True), [KEYS[:, np.newaxis]], "one dimension"),
        (Lookup, (0, True), [], "0 arrays; expected 1"),
        (UpdateRows, (0,), [KEYS, ONES[:1]], "gradients of shape"),
        (UpdateRows, (0,), [KEYS, ONES.astype(np.float64)], "float64"),
        (UpdateRows, (0,), [KEYS], "1 arrays; expected 2"),
        (AssignRows, (False,), [KEYS, ONES[:, :1]], "values of shape"),
        (AssignRows, (False,), [KEYS[[0, 0]], ONES], "repeat"),
        (ExportTable, (), [KEYS], "1 arrays; expected 0"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(kind, arguments, arrays, why):
    tables = attached()
    lookup(tables)
    answer, _ = ask(tables, kind, *arguments, arrays=arrays)
    assert isinstance(answer, Refused)
    assert not answer.is_unknown
    assert why in answer.why
    assert values(tables) == [0, 0]
    assert update(tables, 0) == Done(7, 1), "nothing has counted"


def test_tables_that_differ_are_refused():
    tables = attached()
    answer = attach(tables, worker=1, initial=InitialRows(scale=1.0))
    assert isinstance(answer, Refused)
    assert "initial" in answer.why


def test_an_optimizer_that_cannot_be_used_is_refused():
    optimizer = keras.optimizers.serialize(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    answer = attach(Tables(), optimizer)
    assert isinstance(answer, Refused)
    assert "clipvalue" in answer.why


def test_optimizer_can_be_given_later():
    tables = attached(optimizer=None)
    lookup(tables)
    assert "by which optimizer" in update(tables, 0).why
    attach(tables, worker=1)
    update(tables, 0)
    assert values(tables) == [-1, -1]


def test_the_chiefs_optimizer_replaces_another_one():
    tables = attached()
    lookup(tables)
    update(tables, 0)
    attach(tables, keras.optimizers.serialize(keras.optimizers.SGD(2.0, momentum=0.5)), worker=1)
    update(tables, 1)
    assert values(tables) == [-2, -2], "a worker's does not"
    attach(tables, keras.optimizers.serialize(keras.optimizers.SGD(5.0, name="other")))
    update(tables, 2)
    assert values(tables) == [-3, -3], "the learning rate is the chief's by updates"
    attach(tables, keras.optimizers.serialize(keras.optimizers.SGD(2.0, momentum=0.5)))
    for sequence in (3, 4):
        update(tables, sequence)
    assert values(tables) == [-8, -8], "2 · 1, and 2 · 1.5"


def test_assignment_if_new_is_ignored_after_an_update():
    tables = attached()
    lookup(tables, keys=np.array([8], np.int64))
    assert assign(tables, 1, True, 4) == Done(1, 0)
    assert ask(tables, ExportTable)[1][0].tolist() == [-5, 3]
    update(tables, 0)
    assign(tables, 2, True, 9)
    assert values(tables) == [3, 3], "only if it is new"
    attach(tables, keras.optimizers.serialize(keras.optimizers.Adagrad(1.0)))
    assign(tables, 3, True, 9)
    assert values(tables) == [3, 3], "which it is not for another optimizer"
    assign(tables, 4, False, 9)
    assert values(tables) == [9, 9]


def test_repeated_assignment_is_applied_once():
    """A worker sends a message again that a busy server has not answered: others' updates since must stay."""
    tables = attached()
    assign(tables, 5, False, 4)
    update(tables, 0)
    assert assign(tables, 5, False, 4) == Done(5, 1)
    assert values(tables) == [3, 3]
    attach(tables, incarnation=2)
    assign(tables, 0, False, 4, incarnation=2)
    assert values(tables, incarnation=2) == [4, 4], "another process counts its messages anew"


class Together:
    """A table that two workers update together.

    Attributes:
        answers: to updates, by worker.
    """

    def __init__(self, optimizer=SGD):
        self.tables, self.answers = Tables(), {0: [], 1: []}
        for worker in self.answers:
            assert isinstance(attach(self.tables, optimizer, worker=worker, workers=2), TableAttached)
            lookup(self.tables, worker=worker)

    def update(self, worker, sequence, gradients=ONES, rate=None):
        """Sends an update; what it is answered is in ``answers``, then or later."""
        message = UpdateRows(10 * sequence + worker, worker, 1, "users", sequence, rate)
        self.tables.heard(message, [KEYS, gradients], lambda answer, rows: self.answers[worker].append(answer))

    def values(self):
        return values(self.tables)


def test_joint_updates_are_summed_into_one_update():
    adagrad = keras.optimizers.serialize(keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=0.0))
    both = Together(adagrad)
    both.update(1, 0)
    assert both.values() == [0, 0], "it waits"
    assert both.answers == {0: [], 1: []}
    both.update(0, 0, gradients=3 * ONES)
    assert both.answers == {0: [Done(0, 1)], 1: [Done(1, 1)]}
    np.testing.assert_allclose(both.values(), [-1, -1], rtol=1e-6, err_msg="one update by 4; two would make -1.95")


def test_a_part_that_is_repeated_counts_once():
    both = Together()
    both.update(1, 0)
    both.update(1, 0)
    assert both.answers[1] == [Waiting(1, (0,))], "a sign of life"
    both.update(0, 0)
    both.update(0, 0)
    both.update(1, 0)
    assert both.values() == [-2, -2]
    assert [type(answer) for answer in both.answers[1]] == [Waiting, Done, Done]
    both.update(1, 1)
    assert both.values() == [-2, -2], "the next one waits again"


def test_joint_update_uses_the_chiefs_learning_rate():
    both = Together()
    both.update(0, 0, rate=0.5)
    both.update(1, 0)
    assert both.values() == [-1, -1]


def test_joint_update_is_refused_after_a_worker_ended():
    both = Together()
    both.update(0, 0)
    both.tables.lost(1)
    (refused,) = both.answers[0]
    assert "worker 1 has ended without its part" in refused.why
    assert refused.ended == 1
    both.update(0, 0)
    assert "worker 1 has ended without its part" in both.answers[0][1].why, "nor a later one"
    assert both.values() == [0, 0]


def test_a_worker_that_has_given_its_part_may_end():
    both = Together()
    both.update(1, 0)
    both.tables.lost(1)
    both.update(0, 0)
    assert both.answers[0] == [Done(0, 1)]


def test_invalid_part_is_refused_alone():
    both = Together()
    both.update(0, 0)
    both.update(1, 0, gradients=ONES[:1])
    assert "gradients of shape" in both.answers[1][0].why
    assert both.answers[0] == []
    both.update(1, 0)
    assert both.values() == [-2, -2]


def test_different_numbers_of_joint_workers_are_refused():
    tables = attached(workers=2)
    assert "expected workers 2, as on worker 0; got 3" in attach(tables, worker=1, workers=3).why


def test_restarted_worker_gives_its_part_again():
    both = Together()
    both.update(1, 0)
    attach(both.tables, worker=1, incarnation=2, workers=2)
    both.update(0, 0)
    assert both.answers[0] == [], "the part of its predecessor is forgotten"


def test_repeated_update_with_pull_returns_rows_again():
    tables = attached()
    lookup(tables)
    for _ in range(2):
        arrays = [KEYS, ONES * [[1], [2]], np.array([1, 1, 0])]
        arrays[1] = arrays[1].astype(np.float32)
        answer, (rows,) = ask(tables, UpdateRows, 0, None, False, True, arrays=arrays)
        assert answer == Rows(7, 1)
        assert rows[:, 0].tolist() == [-2, -2, -1]


def test_joint_update_with_pull_is_refused():
    both = Together()
    refused, _ = ask(both.tables, UpdateRows, 0, None, False, True, arrays=[KEYS, ONES, np.array([0])])
    assert "3 arrays; expected 2" in refused.why


class Slow:
    """Snapshots of which one takes until somebody waits for it; until then no other is written."""

    def __init__(self, table):
        self.written, self._is_busy = [], False

    def find(self):
        return None

    def write(self, state, iterations):
        if not self._is_busy:
            self.written.append(iterations)
            self._is_busy = True

    def wait(self):
        self._is_busy = False


def test_closing_writes_a_last_snapshot_despite_unfinished_write():
    tables = Tables(Slow)
    attach(tables)
    update(tables, 0)
    (served,) = tables
    served.close()
    assert served.snapshots.written == [0, 1]
