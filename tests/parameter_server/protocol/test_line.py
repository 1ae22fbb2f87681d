"""Where a server listens, and messages of any length over real sockets."""

import contextlib
import socket
import struct

import pytest
import zmq

from tests.parameter_server.serving import DEADLINE
from tfdist.cluster import hosts
from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.line import _PART, MAX_ENCRYPTED, Line

OF_BOTH_VERSIONS = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
KEYS = Keys.of_secret(b"secret of the job")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""A greeting of ZMTP 3.1, https://rfc.zeromq.org/spec/37/."""


@contextlib.contextmanager
def listening(address="127.0.0.1:0", keys=None):
    with zmq.Context() as context:
        line, address = Line.listening(context, address, keys)
        try:
            yield line, address
        finally:
            line.close()


def test_port_zero_takes_a_free_port():
    with listening() as (_, address):
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        with (
            pytest.raises(TfdistError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"),
            listening(address),
        ):
            pass


def test_invalid_host_name_raises():
    with (
        pytest.raises(TfdistError, match=r"the parameter server's own address a\.\.b:1 cannot be"),
        listening("a..b:1"),
    ):
        pass


@pytest.mark.skipif(not hosts.is_here("[::1]:1"), reason="this machine has no IPv6")
def test_a_host_is_reached_at_all_its_addresses(monkeypatch):
    named = [(family, socket.SOCK_STREAM, 6, "", (number, 0)) for family, number in OF_BOTH_VERSIONS]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: named)
        opened = contextlib.ExitStack()
        line, address = opened.enter_context(listening("both:0"))
    with opened:
        for host in ("127.0.0.1", "[::1]"):
            other = Line.to(line.socket.context, address.replace("both", host), None)
            opened.callback(other.close)
            other.send([host.encode()])
            assert line.poll(DEADLINE)
            assert bytes(line.receive_from()[1][0]) == host.encode()
            assert line.last_address == host.strip("[]")


@pytest.mark.skipif(not hosts.is_here("[::1]:1"), reason="this machine has no IPv6")
@pytest.mark.parametrize(("family", "version"), [(socket.AF_INET6, 1), (socket.AF_INET, 0), (None, 1)])
def test_a_name_is_reached_by_the_version_that_is_preferred(monkeypatch, family, version):
    def resolve(*args, **kwargs):
        if family is None:
            raise socket.gaierror("not known yet")
        return [(family, socket.SOCK_STREAM, 6, "", ("…", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with zmq.Context() as context, contextlib.closing(Line.to(context, "name:1", None)) as line:
        assert line.socket.getsockopt(zmq.IPV6) == version


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])
def test_frames_of_all_lengths_arrive_as_they_are(keys):
    sizes = [0, 1, _PART - 1, _PART, _PART + 1, 2 * _PART, 3 * _PART + 7]
    frames = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    with listening(keys=keys) as (line, address):
        other = Line.to(line.socket.context, address, keys)
        try:
            for given in (frames, frames[::-1], frames[:1], frames[3:4], frames[5:6]):
                other.send(given)
                assert line.poll(DEADLINE)
                peer, received = line.receive_from()
                assert [bytes(frame) for frame in received] == given
                line.answer(peer, given)
                assert other.poll(DEADLINE)
                assert [bytes(frame) for frame in other.receive()] == given
            assert line.last_address == "127.0.0.1"
        finally:
            other.close()


def test_answer_to_a_closed_connection_is_dropped():
    with listening() as (line, _):
        line.answer(b"nobody", [b"x"])


@pytest.mark.parametrize("flags", [2, 6], ids=["message", "command"])
@pytest.mark.parametrize(
    ("announced", "is_ended"), [(MAX_ENCRYPTED + 1, True), (8 << 30, True), (MAX_ENCRYPTED, False)]
)
def test_large_frame_before_the_handshake_closes_the_connection(flags, announced, is_ended):
    """Nothing beyond 64 KiB is read, and no memory found for it, before the handshake has shown who that is."""
    with listening(keys=KEYS) as (_, address), socket.create_connection(address.split(":"), DEADLINE) as stranger:
        stranger.sendall(GREETING)
        greeted = b""
        while len(greeted) < len(GREETING):
            greeted += stranger.recv(len(GREETING) - len(greeted))
        stranger.sendall(bytes([flags]) + struct.pack(">Q", announced))
        if is_ended:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        else:
            stranger.sendall(bytes(announced - 1))  # the last byte is missing
            stranger.settimeout(0.2)
            with pytest.raises(TimeoutError):
                stranger.recv(1)
