import numpy as np
import pytest
import zmq

from tests.parameter_server.serving import SIZE, attach, connected, create, pull, push, serving
from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.worker import client

KEYS = Keys.of_secret(b"secret")


def test_keys_are_derived_from_the_secret():
    assert Keys.of_secret(b"") is None
    assert Keys.of_secret(b"secret") == KEYS
    assert len({KEYS.server, KEYS.client, Keys.of_secret(b"other").server}) == 3
    assert len(KEYS.server) == 40


def test_worker_with_the_secret_trains():
    with serving(keys=KEYS) as server, connected(server, keys=KEYS) as connection:
        attach(connection)
        create(connection)
        push(connection)
        np.testing.assert_array_equal(pull(connection), np.full(SIZE, -1, np.float32))


def test_request_times_out_if_the_handshake_is_refused(monkeypatch):
    """Sent again and again, a request finds no connection; it must not wait for one."""
    monkeypatch.setattr(client, "_AGAIN_SECONDS", 0.05)
    with (
        serving(keys=KEYS) as server,
        connected(server, timeout=1.0) as stranger,
        pytest.raises(PeerLostError, match="has not answered for 1 s"),
    ):
        attach(stranger)


@pytest.mark.parametrize("keys", [None, Keys.of_secret(b"other"), Keys(Keys.of_secret(b"x").server, KEYS.client)])
def test_workers_with_other_keys_are_ignored(keys):
    with serving(keys=KEYS) as server, connected(server, keys=KEYS) as known:
        attach(known)
        with connected(server, timeout=0.5, keys=keys) as stranger, pytest.raises(PeerLostError):
            attach(stranger, worker=3)
        create(known)


def test_worker_rejects_a_server_without_the_secret():
    for keys in (None, Keys.of_secret(b"other")):
        with (
            serving(keys=keys) as server,
            connected(server, timeout=0.5, keys=KEYS) as connection,
            pytest.raises(PeerLostError, match=r"has not answered for 0.5 s.*or it has another secret"),
        ):
            attach(connection)


def test_zmq_without_curve_raises(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    with pytest.raises(TfdistError, match="built without CURVE"):
        Keys.of_secret(b"secret")
