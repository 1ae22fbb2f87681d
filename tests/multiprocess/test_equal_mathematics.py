"""Many processes end where one does: losses, metrics and weights of every case in `programs/equal`.

Each world is launched once and runs all of its cases; every case is then one test.
"""

import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from tests.multiprocess import harness

PROGRAM = harness.PROGRAMS / "equal" / "main.py"
SOURCE = "\n".join(file.read_text() for file in sorted(PROGRAM.parent.glob("*.py")))
OPTIMIZERS = re.findall(r'^    "(\w+)": \{', SOURCE, re.MULTILINE)
ALL = re.findall(r"^@(?:case|spread)\ndef (\w+)", SOURCE, re.MULTILINE) + [f"optimizer_{name}" for name in OPTIMIZERS]
SPREAD = [*re.findall(r"^@spread\ndef (\w+)", SOURCE, re.MULTILINE), "optimizer_SGD", "optimizer_Adam"]

TOLERANCES = {"float32": 1e-5, "low": 2e-2, "near": 5e-2, None: 1e-9}
"""Relative to the largest value, by the name of the group in a case's result. Bfloat16 keeps 8 bits; what is near only
is of each share."""


@cache
def world(size, devices, cases, folder):
    folder.mkdir()
    settings = {"TEST_DEVICES": str(devices), "TEST_CASES": cases}
    harness.run([str(PROGRAM), str(folder)], size, deadline=600, settings=settings)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("worlds")

    def launch(*given):
        """Worlds that are asked for together run at the same time: that of one process leaves a core to others."""

        def start(one):
            size, devices, cases = one
            return world(size, devices, cases, root / f"{size}x{devices}-{zlib.crc32(cases.encode()):x}")

        with ThreadPoolExecutor() as threads:
            return list(threads.map(start, given))

    return launch


def check(name, ranks, one):
    for found in (*ranks, one):
        assert "error" not in found[name], found[name]["error"]
    for rank, found in enumerate(ranks):
        assert json.dumps(found[name]) == json.dumps(ranks[0][name]), f"rank {rank} differs from rank 0"
    expected, got = dict(harness.leaves(one[name])), dict(harness.leaves(ranks[0][name]))
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        if path[0] in ("ranks_only", "ranks_only_history"):
            continue
        tolerance = TOLERANCES.get(path[0], TOLERANCES[None])
        value = np.asarray(value, np.float64)
        scale = np.abs(value).max(initial=1e-12)
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance * scale, err_msg=f"{name}: {path}")


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ALL)
def test_two_processes(name, worlds):
    two, (one,) = worlds((2, 1, "all"), (1, 1, "all"))
    if name.startswith("optimizer_") and name not in one:
        pytest.skip("this version of Keras does not ship it")
    check(name, two, one)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize(("size", "devices"), [(3, 1), (2, 2)], ids=["three-processes", "two-devices-each"])
def test_spread(name, size, devices, worlds):
    spread, (one,) = worlds((size, devices, "spread"), (1, 1, "all"))
    check(name, spread, one)
