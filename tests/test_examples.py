"""Every example runs, on one and on two processes, and gives the result that it describes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess import harness

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, processes, *options, cwd=None):
    command = [sys.executable, "-m", "tfdist.cli", "run", "-n", str(processes), *options, str(EXAMPLES / name)]
    ended = subprocess.run(
        command, env=harness.environment(), capture_output=True, text=True, timeout=200, check=False, cwd=cwd
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + (ended.stderr if options else "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_digits(processes):
    output = run("digits.py", processes)
    assert float(re.search(r"Test accuracy: ([\d.]+)", output)[1]) >= 0.95
    assert re.search(rf"{processes} process\(es\); each sent [\d.]+ MB", output)
    assert output.count("Epoch 15/15") == 1, "one progress bar is seen"


@pytest.mark.multiprocess
def test_custom_loop():
    output = run("custom_loop.py", 2)
    assert float(re.search(r"Epoch 10: loss [\d.]+, accuracy ([\d.]+)", output)[1]) > 0.9


@pytest.mark.multiprocess
def test_text():
    assert float(re.search(r"Test accuracy: ([\d.]+)", run("text.py", 2))[1]) > 0.9


@pytest.mark.multiprocess
def test_servers():
    output = run("servers.py", 2, "--ps", "1")
    found = re.search(r"chief: test accuracy ([\d.]+) after (\d+) updates", output)
    assert float(found[1]) > 0.9
    assert int(found[2]) == 10 * 47, "each batch of each epoch is part of one update"
    updates = [int(number) for number in re.findall(r"epoch \d+: the servers made (\d+) updates", output)]
    assert sum(updates) == 10 * 47


@pytest.mark.multiprocess
def test_two_devices():
    command = [sys.executable, str(EXAMPLES / "two_devices.py")]
    ended = subprocess.run(command, env=harness.environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"Test accuracy: ([\d.]+), on CPU:0 and CPU:1", ended.stdout)
    assert float(found[1]) > 0.85


@pytest.mark.multiprocess
def test_functions():
    assert float(re.search(r"Epoch 10: loss ([\d.]+)", run("functions.py", 2))[1]) < 0.3


@pytest.mark.multiprocess
def test_horovod_fit(tmp_path):
    found = re.findall(r"val_accuracy: ([\d.]+)", run("horovod_fit.py", 2, cwd=tmp_path))
    assert len(found) == 10
    assert float(found[-1]) > 0.85
    assert (tmp_path / "digits.keras").exists()


@pytest.mark.multiprocess
def test_multi_worker(tmp_path):
    """By TF_CONFIG, with either strategy."""
    text = (EXAMPLES / "multi_worker.py").read_text()
    before = text.replace("tfdist.AllReduceStrategy()", "tf.distribute.MultiWorkerMirroredStrategy()")
    assert before != text
    for name, script in (("after.py", text), ("before.py", before)):
        (tmp_path / name).write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{script}")
        with harness.started([str(tmp_path / name)], 2) as processes:
            ended = processes.wait(120)
            if name == "after.py":
                assert [end.code for end in ended] == [0, 0], processes.outputs()
                assert float(re.findall(r"accuracy: ([\d.]+)", ended[0].output)[-1]) > 0.9
                assert (tmp_path / "digits.keras").exists()
            else:
                assert all(end.code and "PerReplica" in end.output for end in ended), processes.outputs()


@pytest.mark.multiprocess
def test_local_sgd():
    output = run("local_sgd.py", 2)
    assert float(re.findall(r"val_accuracy: ([\d.]+)", output)[-1]) > 0.93
    sent, gradients = map(float, re.search(r"each sent ([\d.]+) MB; gradients are ([\d.]+) MB", output).groups())
    assert sent < gradients / 30


@pytest.mark.multiprocess
def test_gossip():
    output = run("gossip.py", 3)
    assert float(re.findall(r"val_accuracy: ([\d.]+)", output)[-1]) > 0.9


@pytest.mark.multiprocess
def test_quorum():
    output = run("quorum.py", 3)
    assert float(re.findall(r"val_accuracy: ([\d.]+)", output)[-1]) > 0.9


@pytest.mark.multiprocess
def test_pipeline_text():
    command = [str(EXAMPLES / "pipeline_text.py"), "--steps", "10", "--sample", "2"]
    ended = harness.tfdist("run", "-n", "4", *command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"Perplexity of other modules: ([\d.]+) before training, ([\d.]+) after", ended.stdout)
    assert float(found[2]) < float(found[1]) / 3
