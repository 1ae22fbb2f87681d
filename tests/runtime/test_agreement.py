"""Options of several tasks, all in this process, with a real rendezvous server."""

import threading

import pytest

from tests.parameter_server.options.test_published import options_of
from tests.runtime.jobs import cluster_of
from tests.runtime.test_membership import entered
from tfdist.errors import MismatchError, RendezvousError, TfdistError
from tfdist.parameter_server import BoundedStaleness, SoftSync
from tfdist.runtime import agreement

DEADLINE = 20.0

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def members():
    """Yields the memberships of a chief, a worker and a server."""
    cluster = cluster_of("chief", chief=1, worker=1, ps=1)
    with entered(cluster, ("chief", 0), ("worker", 0), ("ps", 0)) as made:
        yield made


def test_equal_options_are_agreed_on(members):
    for member in members:
        agreement.agree(member, options_of(BoundedStaleness(2)))


@pytest.mark.parametrize("first", [0, 2])
def test_last_task_to_publish_raises_on_mismatch(members, first):
    """No task waits for the other."""
    chief, _, server = members
    last = server if first == 0 else chief
    agreement.agree(members[first], options_of(BoundedStaleness(2)))
    name = "chief 0" if first == 0 else "ps 0"
    with pytest.raises(MismatchError, match=rf"SoftSync\(\) on this task, and .*\(steps=2\) on {name} \(127"):
        agreement.agree(last, options_of(SoftSync()))


def learning(member, timeout=DEADLINE):
    outcomes = []

    def learn():
        try:
            outcomes.append(agreement.wait_for_options(member, timeout))
        except TfdistError as error:
            outcomes.append(error)

    thread = threading.Thread(target=learn, daemon=True)
    thread.start()
    return thread, outcomes


@pytest.mark.parametrize("who", [0, 1])
def test_server_gets_options_from_any_worker(members, who):
    """The chief may have ended when a server comes back."""
    thread, outcomes = learning(members[2])
    agreement.agree(members[who], options_of(SoftSync(3)))
    thread.join(DEADLINE)
    assert outcomes == [options_of(SoftSync(3))]


def test_waiting_for_options_returns_none_when_job_ends(members):
    thread, outcomes = learning(members[2])
    for member in members[:2]:
        member.leave(None)
    thread.join(DEADLINE)
    assert outcomes == [None]


def test_waiting_for_options_raises_when_job_fails(members):
    thread, outcomes = learning(members[2])
    members[2].control.fail(TfdistError("interrupted (Ctrl-C)"))
    thread.join(DEADLINE)
    assert [str(error) for error in outcomes] == ["interrupted (Ctrl-C)"]


def test_waiting_for_options_times_out(members):
    with pytest.raises(RendezvousError, match=r"no worker has made its ParameterServerStrategy, .* within 0\.1 s"):
        agreement.wait_for_options(members[2], 0.1)


def test_additional_worker_with_other_options_raises():
    cluster = cluster_of("chief", chief=1, ps=1)
    with entered(cluster, ("chief", 0), ("worker", 5)) as (chief, worker):
        agreement.agree(chief, options_of())
        agreement.agree(worker, options_of())
        with pytest.raises(MismatchError, match="on chief 0"):
            agreement.agree(worker, options_of(SoftSync()))
