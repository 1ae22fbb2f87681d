import os
import sys

import pytest

from tfdist.engine import machine_code


@pytest.fixture(autouse=True)
def _loads_anew():
    machine_code.load.cache_clear()
    yield
    machine_code.load.cache_clear()


def test_the_library_can_be_left_out(monkeypatch):
    monkeypatch.setenv(machine_code.VARIABLE, "0")
    assert machine_code.path() is None
    monkeypatch.setenv(machine_code.VARIABLE, "1")
    assert machine_code.path() is None or os.path.exists(machine_code.path())


def test_a_library_that_cannot_be_loaded_says_what_to_do(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(machine_code, "path", lambda: str(broken))
    with pytest.raises(RuntimeError, match=r"cannot load .*broken\.so.* set TFDIST_MACHINE_CODE=0 to do without"):
        machine_code.load()
    assert not machine_code.is_usable()
    (record,) = caplog.records
    assert "all processes sum in Python" in record.getMessage()
    monkeypatch.delitem(sys.modules, "tensorflow")
    assert machine_code.is_usable()
