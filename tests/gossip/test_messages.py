import numpy as np

from tfdist.gossip.messages import GossipMessage, MessageKind


def test_messages_arrive_as_they_were():
    parts = [np.arange(3, dtype=np.uint8), np.ones((2, 3)), np.array(2.0, np.float16), np.empty(0, np.float32)]
    packed = GossipMessage(MessageKind.ANSWER, 7, 2, parts).packed(lambda size: np.empty(size, np.uint8))
    unpacked = GossipMessage.unpacked(packed)
    assert (unpacked.kind, unpacked.round, unpacked.generation) == (MessageKind.ANSWER, 7, 2)
    for part, expected in zip(unpacked.parts, parts, strict=True):
        np.testing.assert_array_equal(part.view(expected.dtype).reshape(expected.shape), expected)
    assert np.shares_memory(unpacked.parts[1], packed)


def test_messages_without_parts():
    unpacked = GossipMessage.unpacked(GossipMessage(MessageKind.ENDED).packed(lambda size: np.empty(size, np.uint8)))
    assert (unpacked.kind, len(unpacked.parts)) == (MessageKind.ENDED, 0)
