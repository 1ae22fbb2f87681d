"""A process's place in its job, for one that is alone; `tests/multiprocess/test_functional.py` has several."""

import json

import pytest

import tfdist
from tfdist import initialization


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(initialization, "_initialized", None)


def test_rank_before_init_raises():
    assert not tfdist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call tfdist.init\(\) first"):
        tfdist.rank()


def test_the_role_is_known_after_a_strategy_was_made(monkeypatch):
    monkeypatch.setattr(initialization.job, "_entered", None)
    with monkeypatch.context() as before:
        before.setattr(initialization.keras_seams, "is_installed", lambda: False)
        with pytest.raises(RuntimeError, match="or make a strategy"):
            tfdist.role()
    tfdist.ParameterServerStrategy()
    assert tfdist.role() == "chief"
    task = {"cluster": {"chief": ["h:1"], "ps": ["h:2"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert tfdist.role() == "evaluator"


def test_init_with_an_unknown_algorithm():
    with pytest.raises(ValueError, match="got 'rings'"):
        tfdist.init(algorithm="rings")
