"""The timeline, from the command line and as a callback; what an epoch's communication is reported to cost."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.multiprocess import harness
from tests.multiprocess.harness import tfdist
from tests.sweeps import sweep
from tfdist.engine import machine_code

PROGRAM = str(harness.PROGRAMS / "observed.py")

pytestmark = pytest.mark.multiprocess


def tracks(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def slices(events, name, rank):
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and e["pid"] == rank)


def check(events, size):
    """Every rank's sums of the gradients are there, with their steps, on clocks that agree."""
    named = tracks(events)
    keys = {name for name in named.values() if "sum of 4 float32" in name}
    assert len(keys) == 1, named
    (key,) = keys
    flights = [slices(events, key, rank) for rank in range(size)]
    opened = int(machine_code.path() is not None)
    assert len(flights[0]) == 20 + opened, "one for every step, and one in which ranks agree on their memory"
    for of_step in zip(*flights, strict=True):
        begins, ends = zip(*of_step, strict=True)
        assert max(begins) < min(ends), "no rank has the sum before every rank has begun"
    (first, *_) = [e for e in events if e["name"] == key and e["pid"] == 0]
    assert first["args"]["contents"].count("wide") == 2
    for rank in range(size):
        assert slices(events, "waits", rank)
        assert slices(events, "computes", rank)
        assert slices(events, "step 1", rank)


def test_reports_and_timeline_callbacks(tmp_path):
    """Where TensorBoard is not installed: only who reads the files needs it."""
    without = tmp_path / "without.py"
    without.write_text("import sys\nsys.modules['tensorboard'] = None\n" + Path(PROGRAM).read_text())
    ended = harness.run([str(without)], 2, settings={"TEST_FOLDER": str(tmp_path)})
    results = harness.results(ended)
    assert results[0] == results[1]
    history = results[0]["history"]
    assert history["mib_sent"][1] * 2**20 >= 10 * 4 * results[0]["parameters"], "2(P-1)/P of the gradients a step"
    assert history["slowest_rank"][1] == 1
    assert all(0 <= share <= 1 for share in history["share_hidden"])
    assert "rank 1 was the slowest: the others waited up to" in ended[0].output
    assert "tfdist: epoch" not in ended[1].output
    events = EventAccumulator(str(tmp_path / "logs"), size_guidance={"tensors": 0}).Reload()
    assert "communication/share_hidden" in events.Tags()["tensors"]
    check(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"], 2)


@pytest.mark.parametrize("size", [2, sweep(3)])
def test_timeline_of_a_script(size, tmp_path):
    out = tmp_path / "out.json"
    ended = tfdist("run", "-n", str(size), "--timeline", str(out), PROGRAM, TEST_FOLDER=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert f"timeline in {out}; open it in https://ui.perfetto.dev" in ended.stderr
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(size))
    assert [path.name for path in tmp_path.glob("out.json*")] == ["out.json"]


@pytest.mark.sweep
def test_timeline_of_a_job_that_fails(tmp_path):
    out = tmp_path / "out.json"
    ended = tfdist("run", "-n", "2", "--timeline", str(out), str(harness.PROGRAMS / "train.py"), TEST_DO="kill")
    assert ended.returncode == 128 + 9
    assert "without rank 1, which wrote nothing" in ended.stderr
    assert json.loads(out.read_text())["traceEvents"]
