from types import SimpleNamespace

import pytest

from tests.parameter_server.serving import DEADLINE, attach, serving
from tests.runtime.jobs import cluster_of
from tfdist.cluster.settings import Timeouts
from tfdist.errors import TfdistError
from tfdist.runtime.server_address import address_of, connection


def test_connection_uses_address_published_by_the_leader(monkeypatch):
    monkeypatch.delenv("TFDIST_SECRET", raising=False)
    tasks = cluster_of("chief", chief=1, ps=2).tasks
    failures = []
    with serving() as server:
        published = {address_of(1): server.address}
        control = SimpleNamespace(look_up=published.__getitem__, known=published.get, present={})
        timeouts = Timeouts(heartbeat=DEADLINE)
        made = connection(control, tasks, 2, "ps 1", timeouts, False, failure=lambda: failures[0] if failures else None)
        try:
            assert not attach(made).is_created
            failures.append(TfdistError("over"))
            with pytest.raises(TfdistError, match="over"):
                attach(made)
        finally:
            made.close()


@pytest.mark.parametrize(("has_copy", "seconds"), [(False, 7.0), (True, 14.0)])
def test_connection_timeout_doubles_if_the_server_has_a_copy(has_copy, seconds):
    control = SimpleNamespace(look_up=lambda key: "127.0.0.1:1", known=lambda key: None, present={})
    tasks = [SimpleNamespace(index=0)]
    made = connection(control, tasks, 0, "ps 0", Timeouts(heartbeat=7.0), has_copy, failure=lambda: None)
    made.close()
    assert made._timeout == seconds


def test_listed_and_additional_workers_have_names():
    """Also a worker that the cluster does not name."""
    tasks = cluster_of("chief", chief=1, ps=1).tasks
    with serving() as server:
        published = {address_of(0): server.address}
        control = SimpleNamespace(look_up=published.__getitem__, known=published.get, present={2: "worker 5"})
        made = connection(control, tasks, 1, "ps 0", Timeouts(heartbeat=DEADLINE), False, failure=lambda: None)
        try:
            assert [made._name_of(number) for number in range(4)] == [*map(str, tasks), "worker 5", "task 3"]
        finally:
            made.close()
