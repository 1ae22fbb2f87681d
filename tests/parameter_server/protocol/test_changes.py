import numpy as np

from tfdist.parameter_server.protocol.changes import Changes

SHAPES = [(100, 4), (3,), (), (50, 2, 2)]


def changes():
    return Changes(SHAPES, [4] * 4)


def rows_since(tracker, edition):
    return {place: rows.tolist() for place, rows in tracker.since(edition).items()}


def test_rows_changed_since_an_edition_are_found():
    tracker = changes()
    editions = [tracker.edition]
    for rows in ({0: np.array([7, 3, 7])}, {3: np.array([0])}, {0: np.array([3]), 3: np.array([], np.int64)}):
        tracker.note([], rows)
        editions.append(tracker.edition)
    assert len(set(editions)) == 4
    assert rows_since(tracker, editions[0]) == {0: [3, 7], 3: [0]}
    assert rows_since(tracker, editions[1]) == {0: [3], 3: [0]}
    assert rows_since(tracker, editions[2]) == {0: [3], 3: []}
    assert rows_since(tracker, editions[3]) == {0: [], 3: []}


def test_densely_changed_variables_are_sent_whole():
    tracker = changes()
    tracker.note([], {0: np.array([1])})
    before = tracker.edition
    tracker.note([0], {})
    assert rows_since(tracker, before) == {}
    now = tracker.edition
    assert rows_since(tracker, now) == {0: []}
    tracker.note([1, 2], {0: np.array([2])})
    assert rows_since(tracker, now) == {0: [2]}


def test_many_rows_are_sent_whole():
    """A row has 16 bytes here, and its index 8."""
    for count, is_sent in ((33, True), (34, False)):
        tracker = changes()
        before = tracker.edition
        tracker.note([], {0: np.arange(count)})
        assert (0 in tracker.since(before)) is is_sent


def test_editions_of_another_server_count_as_old():
    tracker, other = changes(), changes()
    for each in (tracker, other):
        each.note([], {0: np.array([1])})
    assert rows_since(tracker, other.edition) == {}
    assert rows_since(tracker, (tracker.edition[0], 9)) == {}, "no such edition yet"
    assert rows_since(tracker, (tracker.edition[0], -1)) == {}
