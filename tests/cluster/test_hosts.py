from tfdist.cluster import hosts


def test_local_rank_and_size_count_equal_hosts():
    where = ["a", "b", "a", "a", "b"]
    assert [hosts.local_place(where, rank) for rank in range(5)] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_loopback_addresses_are_recognized():
    assert hosts.is_loopback("127.0.0.1:5")
    assert hosts.is_loopback("localhost:5")
    assert not hosts.is_loopback("192.0.2.7:5")
    assert not hosts.is_loopback("no-such-host.invalid:5")


def test_own_addresses_are_recognized():
    assert hosts.is_here("127.0.0.1:5")
    assert hosts.is_here("localhost:5")
    assert not hosts.is_here("192.0.2.7:5")
    assert not hosts.is_here("no-such-host.invalid:5")


def test_host_id_is_stable():
    assert hosts.host_id() == hosts.host_id()
