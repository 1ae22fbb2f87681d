import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.engine import tensorflow_links
from tfdist.engine.group import ProcessGroup
from tfdist.engine.pending import Pending
from tfdist.errors import CollectiveTimeoutError, MismatchError, PeerLostError

DEADLINE = 60


class Monitor:
    """Lets a wait go on until its second check, and then ends it."""

    def __init__(self):
        self.checks, self.has_begun, self.is_over = [], threading.Event(), threading.Event()

    def check(self, seconds):
        self.checks.append(seconds)
        if len(self.checks) > 1:
            raise CollectiveTimeoutError("rank 1 did not take part")

    def over(self):
        self.is_over.set()


@pytest.fixture
def group(monkeypatch):
    """A group of three, whose other members state what the test wants, or else the same."""
    monkeypatch.setattr(tensorflow_links, "_made", None)
    monitor, reported, failures = Monitor(), [], []

    def waits_for(site, contents, has_order):
        assert not has_order
        reported.append(Pending(site[1], site[0]))
        monitor.has_begun.set()
        return reported[-1], monitor

    engine = SimpleNamespace(
        rank=0,
        size=3,
        communicator=SimpleNamespace(hosts=(0, 0, 0)),
        count=lambda members, kind: 0,
        beside=SimpleNamespace(waits_for=waits_for, over=lambda pending: None),
        fail=lambda error, members: failures.append(error),
        control=SimpleNamespace(
            task=0, watch=lambda watcher: None, gather=lambda name, value, tasks: [value] * len(tasks)
        ),
    )
    return SimpleNamespace(group=ProcessGroup(engine), monitor=monitor, reported=reported, failures=failures)


@pytest.fixture
def links(group, monkeypatch):
    """Connections that are pretended, are looked at often, and are none any more after the test."""
    said = []
    monkeypatch.setattr(tensorflow_links, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(tensorflow_links, "_LONG_SECONDS", 0.002)
    monkeypatch.setattr(tensorflow_links.private, "enable_collectives", lambda addresses, rank: "")
    monkeypatch.setattr(tensorflow_links.private, "abort_collectives", said.append)
    made = tensorflow_links.links(group.group, "CPU", None)
    yield SimpleNamespace(made=made, said=said, monitor=group.monitor, reported=group.reported, failures=group.failures)
    made.failed(PeerLostError("the test is over"))


def test_an_operation_before_is_an_error(group):
    """This process has run many."""
    tf.zeros([])
    with pytest.raises(RuntimeError, match="before TensorFlow runs its first operation: make the strategy right after"):
        tensorflow_links.links(group.group, "CPU", None)


def test_devices_of_two_kinds_are_an_error(group):
    group.group.engine.control.gather = lambda name, value, tasks: [value, ["b:1", "GPU"], ["c:1", "CPU"]]
    with pytest.raises(MismatchError, match=r"devices of one kind on all processes; .* have CPU, GPU, CPU"):
        tensorflow_links.links(group.group, "CPU", None)


def test_a_lost_member_ends_sums(links):
    links.made.lost(3, PeerLostError("ps 0 died"))
    assert not links.said
    links.made.lost(1, PeerLostError("rank 1 died"))
    links.made.failed(PeerLostError("rank 1 died, and so the job"))
    assert links.said == ["rank 1 died"]
    assert str(links.made.failure) == "rank 1 died"


@pytest.mark.parametrize("is_in_graph", [True, False])
def test_a_sum_that_does_not_go_on_is_reported_and_ended(links, is_in_graph):
    def count(vector):
        links.made.begin(vector)

    run = tf.function(count) if is_in_graph else count
    for _ in range(2):  # ended first, so that none of the two can be taken for one that does not go on
        links.made.end(tf.ones([2]))
    for _ in range(3):
        run(tf.ones([2]))
    assert links.made.known.wait(DEADLINE)
    assert links.monitor.is_over.wait(DEADLINE)
    assert links.said == ["rank 1 did not take part"]
    assert links.failures == [links.made.failure]
    (pending,) = links.reported
    assert (pending.key, pending.call) == ("sum by TensorFlow", 2)


def test_last_bytes_may_come_after_another_process_has_ended(links, monkeypatch):
    """Until then, nothing says that this process waits in vain."""
    monkeypatch.setattr(tensorflow_links, "_LAST_SECONDS", 1000.0)
    links.made.left(1)
    links.made.begin(tf.ones([2]))
    assert links.monitor.has_begun.wait(DEADLINE)
    links.made.end(tf.ones([2]))
    assert links.monitor.is_over.wait(DEADLINE)
    assert not links.monitor.checks
    assert links.made.failure is None


def test_a_sum_that_goes_on_after_a_while_is_not_ended(links, monkeypatch):
    first_check = threading.Event()
    monkeypatch.setattr(links.monitor, "check", lambda seconds: first_check.set())
    links.made.begin(tf.ones([2]))
    assert first_check.wait(DEADLINE)
    links.made.end(tf.ones([2]))
    assert links.monitor.is_over.wait(DEADLINE)
    assert not links.said
    assert links.made.failure is None
