import queue
import threading

import pytest

from tests.parameter_server.serving import DEADLINE
from tfdist.errors import TfdistError
from tfdist.parameter_server.hierarchy.uplink import Uplink


@pytest.fixture
def made():
    """An uplink, what it has posted, and its failures."""
    posted, failures, connections = queue.Queue(), [], []

    def connect(stack, ended):
        stack.callback(connections.append, "closed")
        return ["connection", ended]

    uplink = Uplink(connect, lambda connections: connections, posted.put, failures.append)
    yield uplink, posted, failures, connections
    uplink.close()
    assert connections == ["closed"]


def test_results_arrive_in_order_on_the_servers_thread(made):
    uplink, posted, failures, _ = made
    results = []
    uplink.ask(lambda session: session[0], results.append)
    uplink.ask(lambda session: 2, results.append)
    events = [posted.get(timeout=DEADLINE) for _ in range(2)]
    assert results == [], "nothing is called on the other thread"
    for event in events:
        event()
    assert results == ["connection", 2]
    assert failures == []


def test_uplink_reports_a_failure(made):
    uplink, posted, failures, _ = made

    def fail(session):
        raise TfdistError("lost")

    uplink.ask(fail)
    posted.get(timeout=DEADLINE)()
    assert [str(failure) for failure in failures] == ["lost"]


def test_abandoned_request_posts_no_result(made):
    """Nor is one that was posted before taken."""
    uplink, posted, failures, _ = made
    begun, results = queue.Queue(), []

    def work(session):
        begun.put(session[1])
        while session[1]() is None:
            pass
        raise session[1]()

    uplink.ask(lambda session: "posted", results.append)
    event = posted.get(timeout=DEADLINE)
    uplink.ask(work, results.append)
    ended = begun.get(timeout=DEADLINE)
    uplink.abandon()
    assert "this server of a host ends" in str(ended())
    uplink.close()
    event()
    assert results == []
    assert posted.empty()
    assert failures == []


def test_request_that_ends_after_abandon_is_the_last(made):
    uplink, posted, failures, _ = made
    begun, abandoned, results = queue.Queue(), threading.Event(), []

    def work(session):
        begun.put("first")
        assert abandoned.wait(DEADLINE)
        return "late"

    uplink.ask(work, results.append)
    uplink.ask(lambda session: begun.put("second"))
    assert begun.get(timeout=DEADLINE) == "first"
    uplink.abandon()
    abandoned.set()
    uplink.close()
    posted.get(timeout=DEADLINE)()
    assert results == [], "its result is dropped"
    assert begun.empty()
    assert posted.empty()
    assert failures == []
