import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.engine import tensorflow_sums
from tfdist.engine.tensorflow_sums import TensorFlowSums
from tfdist.errors import PeerLostError


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


@pytest.mark.parametrize(
    ("message", "kind"),
    [("Collective ops is aborted by: Connection reset by peer", PeerLostError), ("Matrix size-incompatible", None)],
)
def test_cause_of_an_error_of_tensorflow(monkeypatch, message, kind):
    """The job may find out later than TensorFlow which process is lost."""
    links = SimpleNamespace(task="", known=threading.Event(), failure=None, line=lambda device: (1, None))
    monkeypatch.setattr(tensorflow_sums, "links", lambda group, kind, host: links)
    sums = TensorFlowSums(SimpleNamespace(size=2), "CPU:0", None)

    def find_out():
        links.failure = PeerLostError("rank 1 died")
        links.known.set()

    timer = threading.Timer(0.01, find_out)
    timer.start()
    cause = sums.cause_of(tf.errors.UnavailableError(None, None, message))
    timer.join()
    assert kind is type(cause) or (kind is None and cause is None)
