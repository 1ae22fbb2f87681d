import pytest

from tfdist.cluster import spec
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.options.per_host import PerHost

CHIEF, NEAR, FAR, ALONE = range(4)


def tasks(*servers):
    ports = iter(range(1, 100))
    hosts = {"chief": ["a"], "worker": ["a", "b", "c"], "ps": servers, "evaluator": ["b"]}
    jobs = {job: [f"{host}:{next(ports)}" for host in names] for job, names in hosts.items()}
    return spec.from_jobs(jobs, "chief", 0, source="test").tasks


def test_without_a_hierarchy_all_servers_are_roots():
    places = places_of(tasks("a", "b"), None)
    assert (places.roots, places.workers, places.members) == ((4, 5), {}, {CHIEF, NEAR, FAR, ALONE})
    assert (places.server_of(CHIEF), places.chief) == (None, CHIEF)


def test_servers_after_the_roots_serve_their_hosts_workers():
    places = places_of(tasks("a", "b", "b", "a"), PerHost(roots=2))
    assert places.roots == (4, 5)
    assert places.workers == {6: (FAR,), 7: (CHIEF, NEAR)}
    assert places.members == {6, 7, ALONE}
    assert [places.server_of(task) for task in (CHIEF, NEAR, FAR, ALONE, 99)] == [7, 7, 6, None, None]
    assert places.chief == 7


def test_chief_without_host_server_stays_chief_of_roots():
    assert places_of(tasks("a", "b"), PerHost()).chief == CHIEF


def test_host_server_does_not_serve_evaluators():
    assert places_of(tasks("c", "b"), PerHost()).workers == {5: (FAR,)}


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        (
            ("a",),
            r'besides 1 root server\(s\); the cluster has 1 task\(s\) of the job "ps"\. Add',
        ),
        (("a", "b", "b"), r"ps 1 \(b:6\) and ps 2 \(b:7\) would both be the server of host b: leave out one of them"),
        (("a", "d"), r"ps 1 \(d:6\) would be the server of host d, where no worker is. Write the host of its address"),
    ],
)
def test_invalid_server_placement_raises(servers, why):
    with pytest.raises(ClusterSpecError, match=why):
        places_of(tasks(*servers), PerHost())
