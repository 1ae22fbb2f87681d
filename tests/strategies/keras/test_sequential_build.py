"""Models that were made before a seam was installed build through it, once for each seam."""

import keras
import numpy as np
import pytest

from tfdist.strategies.keras import sequential_build


@pytest.fixture
def passed(monkeypatch):
    """Installs two seams, with a model from before, from between and from after; what they are called with."""
    for name in ("build", "add", "__call__"):  # what they were comes back at the end
        monkeypatch.setattr(keras.Sequential, name, getattr(keras.Sequential, name))
    monkeypatch.setattr(sequential_build, "_installed", [])
    return []


def models(make, passed):
    def seam(name):
        def seam_of_build(original):
            def build(self, input_shape=None):
                passed.append((name, id(self)))
                return original(self, input_shape)

            return build

        return seam_of_build

    made = [make()]
    for name in ("first", "second"):
        sequential_build.replace_build(seam(name))
        made.append(make())
    return made


def test_adding_layers_builds_through_each_seam_once(passed):
    for model in models(lambda: keras.Sequential([keras.Input((2,))]), passed):
        for units in (1, 3):
            passed.clear()
            model.add(keras.layers.Dense(units))
            assert sorted(passed) == [("first", id(model)), ("second", id(model))]
        assert model.built
        assert model.output_shape == (None, 3)
        assert model.get_build_config() == {"input_shape": (None, 2)}


def test_first_call_builds_through_each_seam_once(passed):
    for model in models(lambda: keras.Sequential([keras.layers.Dense(1)]), passed):
        passed.clear()
        assert model(np.ones((4, 2))).shape == (4, 1)
        assert sorted(passed) == [("first", id(model)), ("second", id(model))]
        assert model.built
