"""Servers that keep rows of embeddings; jobs with them: `multiprocess/test_embeddings_beside_all_reduce.py`."""

from types import SimpleNamespace

import pytest

from tests.strategies.served import Member
from tfdist.cluster.settings import Timeouts
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.strategies.servers import beside_all_reduce

TASKS = [SimpleNamespace(job="ps", index=0), SimpleNamespace(job="worker", index=0)]


@pytest.fixture
def member(monkeypatch):
    made = Member(cluster=SimpleNamespace(tasks=TASKS), control=SimpleNamespace(task=1, watch=lambda watcher: None))
    monkeypatch.setattr(beside_all_reduce.job, "enter", lambda cluster, timeouts: made)
    return made


def test_servers_are_asynchronous(member, monkeypatch):
    served = []
    monkeypatch.setattr(beside_all_reduce.serving, "serve", lambda *given: served.append(given))
    beside_all_reduce.serve(None, Timeouts())
    ((served_member, options, _),) = served
    assert served_member is member
    assert options.synchronization == Asynchronous()


def test_each_strategy_of_a_process_has_tables_of_its_own(member):
    numbers = iter([0, 1])
    workers = SimpleNamespace(size=3, number=lambda what: next(numbers))
    first, second = (beside_all_reduce.tables(None, workers, Timeouts()) for _ in range(2))
    assert [(tables._prefix, tables._workers) for tables in (first, second)] == [("", 3), ("strategy 1 ", 3)]
