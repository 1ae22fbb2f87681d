from types import SimpleNamespace

import pytest

from tests.parameter_server.serving import DEADLINE, attach, serving
from tests.runtime.jobs import cluster_of
from tfdist.cluster.settings import Timeouts
from tfdist.errors import TfdistError
from tfdist.runtime.server_address import address_of, connection


def test_a_server_is_found_where_its_leader_has_published(monkeypatch):
    monkeypatch.delenv("TFDIST_SECRET", raising=False)
    tasks = cluster_of("chief", chief=1, ps=2).tasks
    failures = []
    with serving() as server:
        published = {address_of(1): server.address}
        control = SimpleNamespace(look_up=published.__getitem__, known=published.get, present={})
        timeouts = Timeouts(heartbeat=DEADLINE)
        made = connection(control, tasks, 2, "ps 1", timeouts, failure=lambda: failures[0] if failures else None)
        try:
            assert not attach(made).is_created
            failures.append(TfdistError("over"))
            with pytest.raises(TfdistError, match="over"):
                attach(made)
        finally:
            made.close()


def test_whom_another_one_waits_for_has_a_name():
    """Also a worker that the cluster does not name."""
    tasks = cluster_of("chief", chief=1, ps=1).tasks
    with serving() as server:
        published = {address_of(0): server.address}
        control = SimpleNamespace(look_up=published.__getitem__, known=published.get, present={2: "worker 5"})
        made = connection(control, tasks, 1, "ps 0", Timeouts(heartbeat=DEADLINE), failure=lambda: None)
        try:
            assert [made._name_of(number) for number in range(4)] == [*map(str, tasks), "worker 5", "task 3"]
        finally:
            made.close()
