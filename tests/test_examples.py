"""Every example runs, on one and on two processes, and gives the result that it describes.

By default they train for two epochs, in forks (`tests/multiprocess/forking.py`), and must have learned something. With
``--all`` they also train as long as they are written, by `tfdist run`, and must reach what they are written for.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.multiprocess


@pytest.fixture(params=["short", sweep("whole")])
def run(request, tmp_path):
    """Runs an example; returns the output of the first process, and of all where there are parameter servers."""
    whole = request.param == "whole"

    def by_the_launcher(name, processes, *options):
        command = [sys.executable, "-m", "tfdist.cli", "run", "-n", str(processes), *options, str(EXAMPLES / name)]
        ended = harness.completed(command, harness.environment(), cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + (ended.stderr if options else "")

    def in_forks(name, processes, *options):
        path = tmp_path / name
        text = re.sub(r"epochs=\d+", "epochs=2", (EXAMPLES / name).read_text())
        text = re.sub(r"epoch in range\(\d+\)", "epoch in range(2)", text)
        path.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{text}")
        tasks = [("worker", rank) for rank in range(processes)] + [("ps", 0)] * ("--ps" in options)
        given = harness.tf_configs(*tasks) if len(tasks) > 1 else [{}]
        with harness.started([str(path)], len(tasks), per_rank=given) as started:
            ended = started.wait()
            assert [end.code for end in ended] == [0] * len(tasks), started.outputs()
        return "\n".join(end.output for end in ended) if options else ended[0].output

    run = by_the_launcher if whole else in_forks
    run.whole, run.folder = whole, tmp_path
    return run


def last(pattern, output):
    """The last number that a pattern finds."""
    return float(re.findall(pattern, output)[-1])


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [1, 2])
def test_digits(run, processes):
    output = run("digits.py", processes)
    assert last(r"Test accuracy: ([\d.]+)", output) >= (0.95 if run.whole else 0.3)
    assert re.search(rf"{processes} process\(es\); each sent [\d.]+ MB", output)


def test_launcher_shows_one_progress_bar_of_digits(tmp_path):
    """By the launcher, which shows what one process writes."""
    (tmp_path / "digits.py").write_text((EXAMPLES / "digits.py").read_text().replace("epochs=15", "epochs=2"))
    ended = harness.tfdist("run", "-n", "2", str(tmp_path / "digits.py"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert last(r"Test accuracy: ([\d.]+)", ended.stdout) >= 0.3
    assert ended.stdout.count("Epoch 2/2") == 1, "one progress bar is seen"
    assert re.search(r"2 process\(es\); each sent [\d.]+ MB", ended.stdout)


def test_custom_loop(run):
    output = run("custom_loop.py", 2)
    assert last(r"Epoch \d+: loss [\d.]+, accuracy ([\d.]+)", output) > (0.9 if run.whole else 0.5)


def test_split_layers(run):
    output = run("split_layers.py", 2)
    assert last(r"Test accuracy: ([\d.]+)", output) > (0.95 if run.whole else 0.5)
    assert re.search(r"2 process\(es\) for \d+ weights; each sent [\d.]+ MB", output)


def test_text(run):
    assert last(r"Test accuracy: ([\d.]+)", run("text.py", 2)) > (0.9 if run.whole else 0.5)


def test_servers(run):
    output = run("servers.py", 2, "--ps", "1")
    epochs = 10 if run.whole else 2
    match = re.search(r"chief: test accuracy ([\d.]+) after (\d+) updates", output)
    assert float(match[1]) > (0.9 if run.whole else 0.5)
    assert int(match[2]) == epochs * 47, "each batch of each epoch is part of one update"
    updates = [int(number) for number in re.findall(r"epoch \d+: the servers made (\d+) updates", output)]
    assert sum(updates) == epochs * 47


@pytest.mark.parametrize("epochs", [2, sweep(8)])
def test_two_devices(epochs, tmp_path):
    path = tmp_path / "two_devices.py"
    path.write_text((EXAMPLES / path.name).read_text().replace("epochs=8", f"epochs={epochs}"))
    (end,) = harness.run([str(path)], 1)
    assert last(r"Test accuracy: ([\d.]+), on CPU:0 and CPU:1", end.output) > (0.85 if epochs == 8 else 0.5)


def test_functions(run):
    assert last(r"Epoch \d+: loss ([\d.]+)", run("functions.py", 2)) < (0.3 if run.whole else 2.0)


def test_horovod_fit(run):
    accuracies = re.findall(r"val_accuracy: ([\d.]+)", run("horovod_fit.py", 2))
    assert len(accuracies) == (10 if run.whole else 2)
    assert float(accuracies[-1]) > (0.85 if run.whole else 0.3)
    assert (run.folder / "digits.keras").exists()


def test_multi_worker(tmp_path):
    """By TF_CONFIG, with either strategy."""
    text = (EXAMPLES / "multi_worker.py").read_text()
    before = text.replace("tfdist.AllReduceStrategy()", "tf.distribute.MultiWorkerMirroredStrategy()")
    assert before != text
    for name, script in (("after.py", text), ("before.py", before)):
        (tmp_path / name).write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{script}")
        with harness.started([str(tmp_path / name)], 2) as processes:
            ended = processes.wait()
            if name == "after.py":
                assert [end.code for end in ended] == [0, 0], processes.outputs()
                assert last(r"accuracy: ([\d.]+)", ended[0].output) > 0.9
                assert (tmp_path / "digits.keras").exists()
            else:
                assert all(end.code and "PerReplica" in end.output for end in ended), processes.outputs()


def test_local_sgd(run):
    output = run("local_sgd.py", 2)
    assert last(r"val_accuracy: ([\d.]+)", output) > (0.93 if run.whole else 0.5)
    sent, gradients = map(float, re.search(r"each sent ([\d.]+) MB; gradients are ([\d.]+) MB", output).groups())
    assert sent < gradients / (30 if run.whole else 5)


def test_gossip(run):
    assert last(r"val_accuracy: ([\d.]+)", run("gossip.py", 3 if run.whole else 2)) > (0.9 if run.whole else 0.3)


def test_quorum(run):
    assert last(r"val_accuracy: ([\d.]+)", run("quorum.py", 3 if run.whole else 2)) > (0.9 if run.whole else 0.2)


@pytest.mark.parametrize("processes", [2, sweep(4)])
def test_pipeline_text(processes):
    """In one pipeline, or in two beside each other, whose losses are the same."""
    command = [str(EXAMPLES / "pipeline_text.py"), "--steps", "10", "--sample", "2"]
    output = harness.run(command, processes)[0].output
    match = re.search(r"Perplexity of other modules: ([\d.]+) before training, ([\d.]+) after", output)
    assert float(match[2]) < float(match[1]) / 3
