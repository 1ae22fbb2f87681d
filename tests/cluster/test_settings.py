import pytest

from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.errors import ClusterSpecError


def test_timeouts_from_the_environment(monkeypatch):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "7.5")
    assert Timeouts.from_environment() == Timeouts(start=7.5)
    for text in ("soon", "-3", "0", "nan"):
        monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", text)
        wrong = f"TFDIST_HEARTBEAT_TIMEOUT must be a number of seconds above 0; got '{text}'"
        with pytest.raises(ClusterSpecError, match=wrong):
            Timeouts.from_environment()


@pytest.mark.parametrize("value", [0, -1, True, "5", None])
def test_timeouts_must_be_positive(value):
    with pytest.raises(ValueError, match=r"Timeouts\.start"):
        Timeouts(start=value)


def test_given_timeouts_override_the_environment(monkeypatch):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "7.5")
    assert Timeouts.of(None) == Timeouts(start=7.5)
    assert Timeouts.of(Timeouts()) == Timeouts()
    with pytest.raises(TypeError, match=r"timeouts must be tfdist.Timeouts, such as .*; got 300"):
        Timeouts.of(300)


def test_secret_is_read_from_environment_or_private_file(monkeypatch, tmp_path):
    monkeypatch.delenv("TFDIST_SECRET", raising=False)
    monkeypatch.delenv("TFDIST_SECRET_FILE", raising=False)
    assert read_secret() == b""
    monkeypatch.setenv("TFDIST_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ClusterSpecError, match="cannot read"):
        read_secret()
    (tmp_path / "for_all").write_text("told")
    (tmp_path / "for_all").chmod(0o644)
    monkeypatch.setenv("TFDIST_SECRET_FILE", str(tmp_path / "for_all"))
    with pytest.raises(ClusterSpecError, match=r"every user can read .* Run `chmod o= "):
        read_secret()
    (tmp_path / "for_all").chmod(0o640)
    assert read_secret() == b"told"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "empty").chmod(0o600)
    monkeypatch.setenv("TFDIST_SECRET_FILE", str(tmp_path / "empty"))
    with pytest.raises(ClusterSpecError, match="is empty"):
        read_secret()
    monkeypatch.setenv("TFDIST_SECRET", "given")
    assert read_secret() == b"given"
