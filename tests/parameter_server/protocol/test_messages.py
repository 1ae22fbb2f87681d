import numpy as np
import pytest

from tfdist.parameter_server.protocol import messages as m
from tfdist.parameter_server.protocol.anonymous_memory import MemoryLocation
from tfdist.parameter_server.protocol.report import ModelReport, WorkerReport
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.protocol.wire import InvalidMessageError

FROM_WORKER = [
    m.Attach(1, 3, 1 << 63, "Adam-1f", 2, 1, ("dense/kernel [4] float32",)),
    m.CreateShard(
        *(2, 3, 7, "digest", (HeldRows("dense/kernel", 0, 4, 8, decays=False, constraint={"class_name": "NonNeg"}),)),
        *({"class_name": "SGD", "config": {"learning_rate": 0.1}}, True, (("momentum",),), ("iteration",)),
    ),
    m.Push(3, 3, 7, 5, 4, 9, 32.0, ("dense", "none", "sparse"), learning_rate=0.5),
    m.Push(3, 3, 7, 5, 4, 9, 32.0, dealt=5, has=m.WorkerValues(((1 << 63) - 1, 4), (0, 2))),
    m.Push(3, 3, 7, 5, 4, 9, 32.0, dealt=m.Decision(6, 0.5, (0, 1), (0, 3))),
    m.Pull(4, 3, 7, "averages"),
    m.Pull(4, 3, 8, "final"),
    m.Suspend(5, 3, 7, is_end=True),
    m.AssignValues(7, 3, 7),
    m.LeaveModel(6, 3, 7, is_over=True),
    m.Inspect(8),
    m.OfferSegment(9, 3, MemoryLocation(7, 3, b"token"), 64, 2),
]
FROM_SERVER = [
    m.Attached(1, 5, is_created=True),
    m.Done(2, 9),
    m.Values(3, 9, 8, 7, (("momentum",), ()), ("iteration",)),
    m.Values(3, 9, 8, 7, edition=((1 << 63) - 1, 4), kinds=("sparse", "dense")),
    m.Waiting(4, (1, 2)),
    m.Refused(5, "why", is_unknown=True, is_over=True, newest=3),
    m.ServerReport(
        6,
        (ModelReport("Adam-1f", 1, 2, 3, 4, 5, 6, {0: 7, 3: 1}, (WorkerReport(0, True, False, 1, 2, 3, 0.5),)),),
        ("worker 0",),
        ("host:1",),
    ),
]


@pytest.mark.parametrize(
    ("codec", "message"),
    [(m.FROM_WORKER, message) for message in FROM_WORKER] + [(m.FROM_SERVER, message) for message in FROM_SERVER],
    ids=lambda value: type(value).__name__,
)
def test_a_message_arrives_as_it_was(codec, message):
    frames = [bytes(frame) for frame in codec.encode(message, [np.arange(3)])]
    arrived, (array,) = codec.decode(frames)
    assert arrived == message
    np.testing.assert_array_equal(array, np.arange(3))


def test_a_message_of_the_other_direction_is_refused():
    for codec, other in ((m.FROM_WORKER, FROM_SERVER), (m.FROM_SERVER, FROM_WORKER)):
        for message in other:
            with pytest.raises(InvalidMessageError, match="cannot be decoded"):
                codec.decode([bytes(frame) for frame in codec.encode(message)])


def test_unknown_kinds_of_gradients_are_refused():
    frames = [bytes(frame) for frame in m.FROM_WORKER.encode(m.Push(3, 3, 7, 5, 4, 9, 32.0, ("other",)))]
    with pytest.raises(InvalidMessageError, match="cannot be decoded"):
        m.FROM_WORKER.decode(frames)
