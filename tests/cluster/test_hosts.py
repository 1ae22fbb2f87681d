import socket

import pytest

from tfdist.cluster import hosts

V4, V6 = int(socket.AF_INET), int(socket.AF_INET6)


def test_local_rank_and_size_count_equal_hosts():
    where = ["a", "b", "a", "a", "b"]
    assert [hosts.local_place(where, rank) for rank in range(5)] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_loopback_addresses_are_recognized():
    assert hosts.is_loopback("127.0.0.1:5")
    assert hosts.is_loopback("localhost:5")
    assert hosts.is_loopback("[::1]:5")
    assert not hosts.is_loopback("192.0.2.7:5")
    assert not hosts.is_loopback("no-such-host.invalid:5")


def test_own_addresses_are_recognized():
    assert hosts.is_here("127.0.0.1:5")
    assert hosts.is_here("localhost:5")
    assert not hosts.is_here("192.0.2.7:5")
    assert not hosts.is_here("no-such-host.invalid:5")


@pytest.mark.parametrize(
    ("host", "entries", "expected"),
    [
        ("127.0.0.1", [(V4, "127.0.0.1")], [(V4, "127.0.0.1")]),
        ("localhost", [(V6, "::1"), (V4, "127.0.0.1")], [(V6, "::1"), (V4, "127.0.0.1")]),
        ("own-name", [(V4, "127.0.1.1")], []),
        ("another", [(V4, "192.0.2.7")], []),
        ("own-and-service", [(V4, "192.0.2.7"), (V4, "127.0.0.1")], []),
        ("own-and-outside", [(V4, "127.0.1.1"), (V4, "0.0.0.0")], []),
    ],
)
def test_others_reach_what_is_listened_at(monkeypatch, host, entries, expected):
    """A name that only this machine takes for a loopback address stands for all interfaces; so does none of its own."""
    named = [(family, socket.SOCK_STREAM, 6, "", (number, 0)) for family, number in entries]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: named)
    own = {family for family in (V4, V6) if hosts._is_own(family, {V4: "127.0.0.1", V6: "::1"}[family])}
    assert hosts.to_listen_at(f"{host}:5") == [entry for entry in expected if entry[0] in own]


def test_host_id_is_stable():
    assert hosts.host_id() == hosts.host_id()
