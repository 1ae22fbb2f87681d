"""Pictures of models."""

import sys

import keras
import pytest

from tests.model_parallel.test_device_scope import two_sequences
from tfdist.model_parallel.analysis import analyze
from tfdist.model_parallel.call_graph import Call, CallGraph
from tfdist.model_parallel.drawing import positions


def test_calls_stand_below_their_inputs_and_beside_each_other():
    calls = [Call(name, "", inputs, 1, 0, 0) for name, inputs in [("a", ()), ("b", (0,)), ("c", (0,)), ("d", (1, 2))]]
    assert positions(CallGraph(calls)) == [(0, 0), (0, 1), (1, 1), (0, 2)]


def test_draw_writes_svg_with_call_names(tmp_path):
    analyze(two_sequences(keras.layers.LSTM(4))).draw(tmp_path / "model.svg")
    assert "concatenate" in (tmp_path / "model.svg").read_text()


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        analyze(two_sequences(keras.layers.LSTM(4))).draw(tmp_path / "model.svg")
