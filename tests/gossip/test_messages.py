import numpy as np

from tfdist.gossip.messages import GossipMessage, MessageKind


def test_messages_arrive_as_they_were():
    parts = [np.arange(3, dtype=np.uint8), np.ones((2, 3)), np.array(2.0, np.float16), np.empty(0, np.float32)]
    packed = GossipMessage(MessageKind.ANSWER, 7, 2, parts).packed(lambda size: np.empty(size, np.uint8))
    found = GossipMessage.unpacked(packed)
    assert (found.kind, found.round, found.generation) == (MessageKind.ANSWER, 7, 2)
    for one, other in zip(found.parts, parts, strict=True):
        np.testing.assert_array_equal(one.view(other.dtype).reshape(other.shape), other)
    assert np.shares_memory(found.parts[1], packed)


def test_messages_without_parts():
    found = GossipMessage.unpacked(GossipMessage(MessageKind.ENDED).packed(lambda size: np.empty(size, np.uint8)))
    assert (found.kind, len(found.parts)) == (MessageKind.ENDED, 0)
