import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.cluster.settings import Timeouts
from tfdist.engine import tensorflow_sums
from tfdist.engine.group import ProcessGroup
from tfdist.engine.tensorflow_sums import TensorFlowSums
from tfdist.errors import CollectiveTimeoutError, MismatchError, PeerLostError


@pytest.fixture
def group(ranks, monkeypatch):
    """A group of three, whose other members state what the test wants, or else the same."""
    monkeypatch.setattr(tensorflow_sums, "_made", None)
    engine = SimpleNamespace(
        rank=0,
        size=3,
        communicator=SimpleNamespace(hosts=(0, 0, 0)),
        count=lambda members, kind: 0,
        control=SimpleNamespace(
            task=0,
            names={2: "rank 2, worker 2"},
            watch=lambda watcher: None,
            gather=lambda name, value, tasks: [value] * len(tasks),
        ),
    )
    return ProcessGroup(engine)


@pytest.fixture
def links(group, monkeypatch):
    """Connections that are pretended, and what has been said when they were ended."""
    said = []
    monkeypatch.setattr(tensorflow_sums.private, "enable_collectives", lambda addresses, rank: "")
    monkeypatch.setattr(tensorflow_sums.private, "abort_collectives", said.append)
    sums = TensorFlowSums(group, "CPU:0", None, Timeouts(collective=7.0, stall=0.01))
    return sums, sums._links, said


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        (tf.zeros([2, 3]), True),
        (tf.zeros([], tf.bfloat16), True),
        (tf.zeros([2], tf.int32), False),
        (tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([3, 2])), False),
    ],
)
def test_dense_tensors_of_floating_point_are_taken(value, is_taken):
    assert TensorFlowSums.takes(value) is is_taken


def test_tensors_of_unknown_size_are_not_taken():
    taken = []
    tf.function(lambda x: taken.append(TensorFlowSums.takes(x))).get_concrete_function(tf.TensorSpec([None]))
    assert taken == [False]


def test_an_operation_before_is_an_error(group):
    """This process has run many."""
    with pytest.raises(RuntimeError, match="before TensorFlow runs its first operation: make the strategy right after"):
        TensorFlowSums(group, "CPU:0", None, Timeouts())


def test_devices_of_two_kinds_are_an_error(group):
    group.engine.control.gather = lambda name, value, tasks: [value, ["b:1", "GPU"], ["c:1", "CPU"]]
    with pytest.raises(MismatchError, match=r"devices of one kind on all processes; .* have CPU, GPU, CPU"):
        TensorFlowSums(group, "CPU:0", None, Timeouts())


def test_a_lost_member_ends_sums(links):
    _, watcher, said = links
    watcher.lost(3, PeerLostError("ps 0 died"))
    assert not said
    watcher.lost(1, PeerLostError("rank 1 died"))
    watcher.failed(PeerLostError("rank 1 died, and so the job"))
    assert said == ["rank 1 died"]
    assert str(watcher.failure) == "rank 1 died"


def test_a_member_that_ends_its_script_ends_sums_a_while_later(links):
    _, watcher, _ = links
    watcher.left(0)
    watcher.left(2)
    assert watcher.known.wait(60)
    assert "rank 2, worker 2 has ended its script without it" in str(watcher.failure)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Collective ops is aborted by: Connection reset by peer", PeerLostError),
        ("Collective has timed out during execution.", CollectiveTimeoutError),
        ("Matrix size-incompatible", None),
    ],
)
def test_cause_of_an_error_of_tensorflow(links, message, kind):
    """The job may find out later than TensorFlow which process is lost."""
    sums, watcher, _ = links
    timer = threading.Timer(0.01, watcher.failed, [PeerLostError("rank 1 died")])
    timer.start()
    cause = sums.cause_of(tf.errors.UnavailableError(None, None, message))
    timer.join()
    assert kind is type(cause) or (kind is None and cause is None)
