import msgspec
import pytest

from tfdist.cluster.messages import Reply, encode, from_server
from tfdist.cluster.quorum_messages import Enlisted, Meeting, MeetingOutcome, Partner


@pytest.mark.parametrize(
    "value",
    [
        Enlisted(3, None, ""),
        Enlisted(3, 1, "host1:5000"),
        Meeting(2, (Partner(0, 640, "host0:1"), Partner(2, 64, "host2:1")), epoch=4),
        Meeting(over=True),
        MeetingOutcome(True, ends=True),
        MeetingOutcome(False),
    ],
)
def test_reply_value_is_decoded_equal(value):
    reply = from_server(encode(Reply(1, msgspec.to_builtins(value))))
    assert msgspec.convert(reply.value, type(value)) == value
