"""Programs as users write them come to their end on parameter servers, learn, and leave all workers the same model."""

import json

import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

RUNNER = harness.PROGRAMS.parents[1] / "programs" / "servers" / "runner.py"
PROGRAMS = ["tutorial", *map(sweep, ("vae", "distillation", "ctc", "text_generation"))]


@pytest.fixture(scope="module")
def worker_results(request, tmp_path_factory):
    """What each worker says of each selected program, by name."""
    names = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    tmp_path = tmp_path_factory.mktemp("servers")
    given = harness.tf_configs(("worker", 0), ("worker", 1), ("ps", 0))
    command, settings = [str(RUNNER), str(tmp_path), *names], {"TEST_FOLDER": str(tmp_path)}
    with harness.started(command, len(given), settings, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * len(given), processes.outputs()
    harness.assert_nothing_left()
    lines = [line for end in ended for line in end.output.splitlines() if "RESULT " in line]
    results = [json.loads(line.partition("RESULT ")[2]) for line in lines]
    return {name: [result for result in results if result["name"] == name] for name in names}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_train_on_servers(name, worker_results):
    first, second = worker_results[name]
    assert first["sums"] == second["sums"], "the workers' weights differ"
    assert first["updates"] == second["updates"]
    assert all(first["updates"]), "no server has made an update"
    for losses in zip(first["losses"], second["losses"], strict=True):
        assert sum(worker_losses[-1] for worker_losses in losses) < sum(worker_losses[0] for worker_losses in losses), (
            losses
        )
