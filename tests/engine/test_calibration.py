import dataclasses
import json

import pytest

from tfdist.cluster.settings import Timeouts
from tfdist.collectives.cost import TYPICAL
from tfdist.comm.local import LocalWorld
from tfdist.engine import calibration
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import CalibrationError, MismatchError


def test_different_algorithms_are_an_error_that_names_them(ranks):
    with pytest.raises(
        MismatchError, match=r"the algorithm auto.*the algorithm ring|the algorithm ring.*algorithm auto"
    ):
        ranks(2)(lambda group: calibration.agreed(group, ("auto", "ring")[group.rank]))


def test_algorithms_by_name_need_no_calibration(ranks):
    assert ranks(2)(lambda group: calibration.agreed(group, "ring")) == [None, None]
    assert ranks(2)(lambda group: [calibration.agreed(group, name) for name in ("ring", "auto")])[1] == [None, TYPICAL]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(calibration.VARIABLE, raising=False)
    return tmp_path


def test_calibration_is_loaded_on_the_same_machine_only(cache):
    here, there = calibration.machine((0, 0)), calibration.machine((0, 0, 1))
    assert calibration.load(here) is None
    path = calibration.store(TYPICAL, here)
    assert path.is_relative_to(cache)
    assert calibration.load(here) == TYPICAL
    assert calibration.load(there) is None


def test_a_file_from_another_machine_is_an_error_that_names_what_differs(cache, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(cache / "mine.json"))
    calibration.store(TYPICAL, {**calibration.machine((0, 0)), "processor": "Abacus"})
    with pytest.raises(CalibrationError, match=r"rank 0 \(processor: 'Abacus' in the file, .* on this rank\)"):
        calibration.load(calibration.machine((0, 0)))


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"machine": {}, "calibration": {"host": {}}})])
def test_damaged_calibration_file_raises(cache, monkeypatch, text):
    path = cache / "mine.json"
    path.write_text(text)
    monkeypatch.setenv(calibration.VARIABLE, str(path))
    with pytest.raises(CalibrationError, match="cannot read the calibration"):
        calibration.load(calibration.machine((0, 0)))


def test_missing_calibration_file_raises(cache, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(cache / "none.json"))
    with pytest.raises(CalibrationError, match="No such file"):
        calibration.load(calibration.machine((0, 0)))


def test_groups_use_the_calibration_of_their_job(cache, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(cache / "mine.json"))
    hosts = (0, 0, 1, 1)
    faster = dataclasses.replace(TYPICAL, call_seconds=1e-9)
    calibration.store(faster, calibration.machine(hosts))
    engine = Engine(LocalWorld(4, hosts).communicator(2), None, Timeouts())
    for members in (None, (2, 0), (3, 1, 2)):
        assert calibration.read(calibration.written(ProcessGroup(engine, members))) == faster
    calibration.store(faster, {**calibration.machine(hosts), "processor": "Abacus"})
    with pytest.raises(CalibrationError, match="was not made for the machines and processes of rank 2"):
        calibration.written(ProcessGroup(engine, (2, 0)))
