"""Ray Train as the launcher, where it is installed: by `make test-all`."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.multiprocess import harness


@pytest.mark.multiprocess
@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'ray[train]')")
def test_workers_of_ray_train(tmp_path):
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "RAY_TRAIN_V2_ENABLED": "1"}
    command = [sys.executable, str(harness.PROGRAMS / "ray_train.py"), str(tmp_path)]
    ended = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (one,) = [json.loads((tmp_path / "0-of-1.json").read_text())]
    two = [json.loads((tmp_path / f"{rank}-of-2.json").read_text()) for rank in range(2)]
    assert [result["size"] for result in two] == [2, 2]
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0]["loss"], one["loss"], rtol=1e-5)
    for weight, expected in zip(two[0]["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5)
