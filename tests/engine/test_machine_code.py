import os
import sys
import zlib

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


@pytest.mark.parametrize(("built", "is_usable"), [(b"int sum;", True), (b"int add;", False), (None, False)])
def test_a_library_must_be_built_from_the_source_beside_it(monkeypatch, tmp_path, caplog, built, is_usable):
    """A library that is older than its source may lack what the Python of today calls."""
    (tmp_path / "shared_sums.c").write_bytes(b"int sum;")
    library = tmp_path / "shared_sums.library.so"
    library.write_bytes(b"code\0" + (b"" if built is None else b"built from %08x\0" % zlib.crc32(built)))
    monkeypatch.setattr(machine_code, "path", lambda: str(library))
    monkeypatch.delitem(sys.modules, "tensorflow")
    assert machine_code.is_usable() == is_usable
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("it was not built from the shared_sums.c beside it. Install tfdist again" in said) == (not is_usable)


@pytest.mark.skipif(machine_code.path() is None, reason="the library is not built")
def test_the_library_is_built_from_its_source():
    assert machine_code.is_usable()
