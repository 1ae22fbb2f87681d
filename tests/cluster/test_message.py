import msgspec
import pytest

from tfdist.cluster.message import RendezvousMessage


class Said(RendezvousMessage, frozen=True):
    what: str


def test_a_message_names_its_class():
    assert msgspec.json.decode(msgspec.json.encode(Said("yes"))) == {"type": "said", "what": "yes"}


def test_decoding_as_another_class_raises():
    with pytest.raises(msgspec.ValidationError, match="heard"):
        msgspec.json.decode(b'{"type": "heard", "what": "yes"}', type=Said)


def test_a_message_does_not_change():
    with pytest.raises(AttributeError):
        Said("yes").what = "no"
