"""`tfdist bench` on real processes, however they are started."""

import json

import pytest

from tests.multiprocess import harness
from tests.multiprocess.harness import tfdist
from tfdist.collectives.algorithms import ALGORITHMS

pytestmark = pytest.mark.multiprocess

QUICK = ["--mib", "0.01"]


def test_measures_every_algorithm_and_keeps_the_calibration(tmp_path):
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    arguments = ["bench", "--processes", "2", *QUICK, "1", "--json", str(figures), "--plot", str(plot)]
    ended = tfdist(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "2 processes on 1 machine" in ended.stdout
    assert "µs a message" in ended.stdout
    (kept,) = (tmp_path / "tfdist").glob("calibration-*.json")
    assert f'Calibration stored in {kept}, for algorithm="auto".'.split() == ended.stdout.split()[-6:]
    report = json.loads(figures.read_text())
    assert json.loads(kept.read_text())["calibration"] == report["calibration"]
    assert all(level["latency"] > 0 for level in (report["calibration"]["host"], report["calibration"]["network"]))
    assert {row["algorithm"] for row in report["rows"]} == set(ALGORITHMS)
    assert all(row["measured"] > 0 and row["bound"] > 0 for row in report["rows"])
    assert plot.stat().st_size > 1000


def test_no_store_writes_no_calibration(tmp_path):
    arguments = ["bench", "-n", "2", *QUICK, "--algorithms", "ring", "--no-store"]
    ended = tfdist(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "µs a message" in ended.stdout
    assert "Calibration stored" not in ended.stdout
    assert not list(tmp_path.rglob("*.json"))


def test_measures_both_levels_where_mpi_sees_two_machines(tmp_path):
    command = ["-m", "tfdist.cli", "bench", *QUICK, "--algorithms", "ring", "hierarchical"]
    settings = {"MPIR_CVAR_NUM_CLIQUES": "2", "XDG_CACHE_HOME": str(tmp_path)}
    first, *_ = harness.run(command, 4, settings=settings)
    assert "4 processes on 2 machines" in first.output
    assert "between machines:" in first.output


@pytest.mark.skipif(not harness.MPIEXEC.exists(), reason="needs MPICH's mpiexec")
def test_runs_under_mpiexec(tmp_path):
    bench = ["-m", "tfdist.cli", "bench", *QUICK, "--algorithms", "ring"]
    ended = harness.mpiexec(3, *bench, XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "3 processes on 1 machine" in ended.stdout


def test_calibration_of_another_machine_is_refused_by_auto(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"machine": {"processor": "Abacus"}, "calibration": {}}))
    settings = {"TFDIST_CALIBRATION": str(path), "TEST_ALGORITHM": "auto"}
    with harness.started([str(harness.PROGRAMS / "train.py")], 2, settings) as processes:
        ended = processes.wait()
    assert [end.code for end in ended] == [1, 1], processes.outputs()
    assert "CalibrationError: rank 0 cannot read the calibration" in ended[0].output
    assert "PeerLostError: rank 0" in ended[1].output


def test_bench_of_a_single_process_fails():
    ended = tfdist("bench")
    assert ended.returncode == 2
    assert "expected several processes, got one" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "-3"], "a whole number of at least 1, got '-3'"),
        (["--proc", "2"], "unrecognized arguments: --proc"),
        (["-n", "2", "--mib", "-1"], "a size in MiB"),
        (["-n", "2", "--mib", "nan"], "a size in MiB"),
        (["-n", "2", "--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    ended = tfdist("bench", *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
