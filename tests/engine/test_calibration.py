import json

import pytest

from tfdist.collectives.cost import TYPICAL
from tfdist.engine import calibration
from tfdist.errors import CalibrationError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(calibration.VARIABLE, raising=False)
    return tmp_path


def test_what_is_stored_is_loaded_for_the_same_machine_only(cache):
    here, there = calibration.machine((0, 0)), calibration.machine((0, 0, 1))
    assert calibration.load(here) is None
    path = calibration.store(TYPICAL, here)
    assert path.is_relative_to(cache)
    assert calibration.load(here) == TYPICAL
    assert calibration.load(there) is None


def test_a_file_from_another_machine_is_an_error_that_names_what_differs(cache, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(cache / "mine.json"))
    calibration.store(TYPICAL, {**calibration.machine((0, 0)), "processor": "Abacus"})
    with pytest.raises(CalibrationError, match=r"rank 0 runs \(processor: 'Abacus' there, .* here\)"):
        calibration.load(calibration.machine((0, 0)))


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"machine": {}, "calibration": {"host": {}}})])
def test_a_damaged_file(cache, monkeypatch, text):
    path = cache / "mine.json"
    path.write_text(text)
    monkeypatch.setenv(calibration.VARIABLE, str(path))
    with pytest.raises(CalibrationError, match="cannot read the calibration"):
        calibration.load(calibration.machine((0, 0)))


def test_a_file_that_is_named_and_not_there(cache, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(cache / "none.json"))
    with pytest.raises(CalibrationError, match="No such file"):
        calibration.load(calibration.machine((0, 0)))
