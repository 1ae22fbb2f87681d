"""Rounds of a quorum: trajectories against NumPy, everything of Keras beside it, and processes that come and go."""

import contextlib
import re
import signal
import time

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "quorum.py")
FAULTS = str(harness.PROGRAMS / "in_rounds" / "quorum_faults.py")
CHECKS = ["golden", "features", "layers", "compressed", "loops", "again", "loading", "restarted", "schedules"]
CHECKS += ["slow_end", "uneven"]


@checks({1: ["restarted", sweep("golden")], 2: CHECKS, 3: [*map(sweep, ("golden", "again", "layers", "loading"))]})
def test_quorum_trains_on_several_processes(size, check, passes):
    passes(size, check)


def epochs(output):
    return [int(number) for number in re.findall(r"^EPOCH (\d+) ", output, re.MULTILINE)]


def await_epochs(processes, rank, count=3):
    """Waits until a rank has ended so many more epochs."""
    before, end = len(epochs(processes.output(rank))), time.monotonic() + harness.DEADLINE
    while len(epochs(processes.output(rank))) < before + count:
        assert time.monotonic() < end, processes.outputs()
        assert processes.popens[rank].poll() is None, processes.outputs()
        time.sleep(0.02)


def test_processes_stop_die_and_come_again(tmp_path):
    """Any of them, the chief too; those that are left go on, and in the end all have the same weights."""
    configs = harness.tf_configs(("worker", 0), ("worker", 1), ("worker", 2))
    with contextlib.ExitStack() as stack:

        def start(*ranks):
            command, settings = [FAULTS, str(tmp_path)], [{**configs[rank], "TFDIST_SECRET": "s"} for rank in ranks]
            return stack.enter_context(harness.started(command, len(ranks), per_rank=settings))

        first = start(0, 1, 2)
        for rank in range(3):
            await_epochs(first, rank)
        first.signal(1, signal.SIGSTOP)
        await_epochs(first, 0)
        first.signal(1, signal.SIGCONT)
        await_epochs(first, 1)
        first.signal(2, signal.SIGKILL)
        await_epochs(first, 0)
        second = start(2)
        await_epochs(second, 0)
        first.signal(0, signal.SIGKILL)
        await_epochs(first, 1)
        chief = start(0)
        await_epochs(chief, 0)
        last = max(epochs(first.output(1))) + 20
        (tmp_path / "new").write_text(str(last))
        (tmp_path / "new").rename(tmp_path / "last")
        end = time.monotonic() + harness.DEADLINE
        while any(job.popens[rank].poll() is None for job, rank in ((first, 1), (second, 0), (chief, 0))):
            assert time.monotonic() < end, "\n".join(job.outputs() for job in (first, second, chief))
            time.sleep(0.02)
        outputs = [first.output(1), second.output(0), chief.output(0)]
        codes = [first.popens[1].poll(), second.popens[0].poll(), chief.popens[0].poll()]
    assert codes == [0, 0, 0], "\n".join(outputs)
    results = harness.results([harness.Ended(0, output) for output in outputs])
    assert results[0]["hashes"] == results[1]["hashes"] == results[2]["hashes"], outputs
    assert results[0]["late"] > 0, "what it had learned when it was stopped was brought later"
    assert results[0]["epochs"][0] == 0
    assert 0 < results[1]["epochs"][0] < results[2]["epochs"][0], "they begin with the epoch of the others"
    ends = {result["epochs"][-1] for result in results}  # `fit` ends for all when it ends for one
    assert max(ends) == last, "who was slower than the grace is behind, by as many epochs as it took"
    for result in results:
        expected = [0.01 * 0.999 ** (epoch + 1) for epoch in result["epochs"]]
        assert result["rates"] == pytest.approx(expected, rel=1e-3), "a schedule that is relative to the rate before"
    assert results[2]["losses"][0] < 0.5 * results[0]["losses"][0], "with the weights of the others"
    assert "worker 2 " in outputs[0], "who is lost is told by name"
    harness.assert_nothing_left()
