"""Functions that are about to be replaced: those of this file, as if they were Keras's."""

import pytest

from tfdist.seams import signatures


@pytest.fixture
def owner():
    class Owner:
        def told(self, what):
            return [what]

    return Owner


def test_missing_function_raises_and_names_supported_version(owner):
    with pytest.raises(ImportError, match=r"does not fit Keras 3\.\d+.*Owner.made is gone.*pip install 'keras==3.15"):
        signatures.check(owner, "made")


@pytest.mark.parametrize("parameters", ["x", "self, x, y", "self, *x"])
def test_other_parameters_are_an_error(owner, monkeypatch, parameters):
    monkeypatch.setitem(signatures._PARAMETERS, "Owner.told", [parameters, "self, what, more"])
    owner.told.__module__ = "keras.src.somewhere"
    with pytest.raises(ImportError, match=r"Owner.told takes \(self, what\); tfdist expects \(.*\) or \(self, wh"):
        signatures.check(owner, "told")
    owner.told.__module__ = "another_plugin"
    assert signatures.check(owner, "told") is owner.told


def test_a_newer_keras_is_warned_of_once(monkeypatch, caplog, owner):
    signatures._warn_of_untried.cache_clear()
    monkeypatch.setattr(signatures.keras, "__version__", "3.99.1")
    for _ in range(2):
        assert signatures.check(owner, "told") is owner.told
    assert [record.getMessage() for record in caplog.records] == [
        "tfdist: Keras 3.99.1 has not been tried; the newest tried is 3.15."
    ]
