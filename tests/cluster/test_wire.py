import pytest

from tfdist.cluster import wire


def test_messages_survive_the_wire():
    message = {"type": "put", "key": "ü", "value": 'a"b\\'}
    line = wire.encode(message)
    assert line.count(b"\n") == 1
    assert wire.decode(line) == message


@pytest.mark.parametrize("line", [b"", b"[]", b"3", b"{", b"\xff\xfe"])
def test_what_is_no_message(line):
    with pytest.raises(ValueError):  # noqa: PT011  (json's errors and ours are both ValueErrors)
        wire.decode(line)


def test_proofs():
    claims, nonces = {"rank": 1}, (wire.nonce(), wire.nonce())
    proof = wire.prove(b"secret", "task", nonces, claims)
    assert wire.proven(proof, wire.prove(b"secret", "task", nonces, claims))
    for other in (
        wire.prove(b"other", "task", nonces, claims),
        wire.prove(b"secret", "server", nonces, claims),
        wire.prove(b"secret", "task", nonces[::-1], claims),
        wire.prove(b"secret", "task", nonces, {"rank": 0}),
        None,
        7,
    ):
        assert not wire.proven(other, proof)
