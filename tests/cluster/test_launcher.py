import os

import pytest

from tfdist.cluster import launcher


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*launcher._SIZES, launcher.REPORT):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_a_process_is_alone():
    assert launcher.size() == 1


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_size_is_read_from_launcher_variables(monkeypatch, name):
    monkeypatch.setenv(name, "12")
    assert launcher.size() == 12


def test_invalid_size_variables_are_ignored(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "-3")
    assert launcher.size() == 1
    monkeypatch.setenv("MV2_COMM_WORLD_SIZE", "4")
    assert launcher.size() == 4


def test_reports_are_written_to_the_launchers_descriptor(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(launcher.REPORT, str(writing))
    launcher.report_to_launcher(launcher.VICTIM)
    launcher.report_to_launcher(launcher.CAUSE)
    assert os.read(reading, 100) == b"a victim\nthe cause\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("value", [None, "", "no number", "-1"])
def test_missing_or_invalid_report_descriptor_is_ignored(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv(launcher.REPORT, value)
    launcher.report_to_launcher(launcher.CAUSE)


def test_a_launcher_that_is_gone_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(launcher.REPORT, str(writing))
    os.close(reading)
    launcher.report_to_launcher(launcher.CAUSE)  # nobody reads
    os.close(writing)
    launcher.report_to_launcher(launcher.CAUSE)  # no such descriptor
