"""Training through `fit` on parameter servers, with real processes."""

import json
import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import selected
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "parameter_server.py")
STEPS = 176
"""Number of steps of each worker: 8 epochs of 22 batches."""


EQUAL = [
    *("momentum", "sparse adagrad", "mean", "assigned"),
    *map(sweep, ("adamw", "clipnorm")),
    *map(sweep, ("averages", "sgd", "adam", "clipvalue", "schedule", "accumulation", "lamb", "sparse sgd")),
    *map(sweep, ("steps", "sparse rmsprop", "constraints")),
]

PUSHES = {"local": 8 * 6, "local-synchronous": 8 * 6, "elastic": STEPS // 4}
"""Number of pushes of each worker: every 4 steps, and with local steps also for the 2 steps left at an epoch's end."""


MODES = [
    *("asynchronous", "hogwild"),
    *map(sweep, ("local-synchronous", "bounded", "synchronous", "soft", "compensated", "local", "elastic")),
]


@pytest.mark.parametrize("mode", MODES)
def test_digits_are_learnt(mode):
    """With a secret, as `tfdist run` sets one. In one mode, an evaluator runs the same script."""
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)] + [("evaluator", 0)] * (mode == "asynchronous")
    given = harness.tf_configs(*tasks)
    with harness.started([PROGRAM, mode], len(tasks), {"TFDIST_SECRET": "x"}, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * len(tasks), processes.outputs()
    results = harness.results(ended[:2])
    for evaluated in harness.results(ended[4:]):
        assert evaluated["epoch"] == sorted(set(evaluated["epoch"])), "each version once"
        assert 0 < evaluated["epoch"][-1] <= 2 * STEPS
        assert len(evaluated["val_accuracy"]) == len(evaluated["epoch"])
    for result in results:
        assert result["accuracy"] > 0.8, results
        assert result["steps"] == PUSHES.get(mode, STEPS)
    updates = max(result["iterations"] for result in results)
    if mode in PUSHES or mode == "hogwild":
        assert updates == STEPS, "the optimizer is the worker's own"
    elif mode in ("synchronous", "soft"):
        assert updates <= STEPS, "each is the mean of two gradients"
    else:
        assert STEPS < updates <= 2 * STEPS, "each is of one gradient, and counts once"
    if mode in ("synchronous", "local-synchronous"):
        assert results[0]["norm"] == results[1]["norm"]
    harness.assert_nothing_left()


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    """What both workers found in each case of `programs/servers_equal.py`, by name."""
    program = [str(harness.PROGRAMS / "servers_equal.py")]
    names = ",".join(selected(request, "test_synchronous_steps_equal_one_process"))
    given = harness.tf_configs(("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1))
    settings = {"TEST_CASES": names, "TEST_FOLDER": str(tmp_path_factory.mktemp("cases"))}
    with harness.started(program, 4, settings, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * 4, processes.outputs()
    harness.assert_nothing_left()
    results = harness.results(ended[:2])
    return {name: (result, results[1][name]) for name, result in results[0].items()}


@pytest.mark.parametrize("name", EQUAL)
def test_synchronous_steps_equal_one_process(name, cases):
    for result in cases[name]:
        assert result["error"] < 1e-5
        assert result["sum"] == cases[name][0]["sum"], "the workers' weights differ"
        assert result["iterations"] == 12
        assert result["is_there"], "variables are on another device than that of the worker"


def test_a_worker_is_killed_and_the_other_does_not_wait_for_it():
    ports = iter(harness.free_ports(3))
    tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
    cluster = {}
    for job, _ in tasks:
        cluster.setdefault(job, []).append(f"127.0.0.1:{next(ports)}")
    configs = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in tasks
    ]
    with harness.started([PROGRAM, "bounded"], 3, {"TEST_DIE_AT_EPOCH": "3"}, per_rank=configs) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], outputs
        (result,) = harness.results(ended[:1])
        assert result["steps"] == STEPS, outputs
        assert result["accuracy"] > 0.8, outputs
        assert "worker 1 (127.0.0.1" in ended[0].output, outputs
    harness.assert_nothing_left()
