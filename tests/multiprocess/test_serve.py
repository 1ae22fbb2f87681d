"""Parameter servers without the workers' script, with real processes."""

import json
import os

import numpy as np
import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "servers_without_script.py")
STEPS = 8 * 22


def test_servers_learn_the_options_from_the_workers(tmp_path):
    """One server finds its task in TF_CONFIG, the other one in its arguments; both import the optimizer's module."""
    ports = [f"127.0.0.1:{port}" for port in harness.free_ports(4)]
    cluster = {"worker": ports[:2], "ps": ports[2:]}
    tasks = [{"type": job, "index": index} for job in cluster for index in (0, 1)]
    configs = [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]
    serve = ["-m", "tfdist.cli", "serve", "--import", "own_optimizer"]
    path = {"PYTHONPATH": os.pathsep.join([str(harness.PROGRAMS), harness.environment()["PYTHONPATH"]])}
    named = [*serve, "--cluster", json.dumps(cluster), "--index", "1"]
    with (
        harness.started(serve, 1, path, per_rank=configs[2:3]) as first,
        harness.started(named, 1, path) as second,
        harness.started([PROGRAM, str(tmp_path / "snapshots")], 2, per_rank=configs) as workers,
    ):
        ended = [*workers.wait(), *first.wait(), *second.wait()]
        outputs = "\n".join(processes.outputs() for processes in (workers, first, second))
    assert [end.code for end in ended] == [0, 0, 0, 0], outputs
    results = harness.results(ended[:2])
    assert [result["pushes"] for result in results] == [STEPS] * 2, outputs
    assert max(result["iterations"] for result in results) == 2 * STEPS, outputs
    assert min(result["accuracy"] for result in results) > 0.8, outputs
    for server, end in enumerate(ended[2:]):
        said = f"ps {server} ({ports[2 + server]}) serves with BoundedStaleness(steps=2), Gradients(compression=Int8("
        assert said in end.output, outputs
        (*_, newest) = sorted(tmp_path.glob(f"snapshots/Halved-*/server-{server}-of-2.*.npz"))
        with np.load(newest) as file:
            dtypes = {name: file[name].dtype.name for name in file.files}
        assert "float32" not in dtypes.values(), f"Keras's floatx is that of the workers: {dtypes}"
    harness.assert_nothing_left()
