import types

import pytest

from tests.strategies.private_modules import importers
from tfdist.strategies import keras_private


def test_private_modules_of_keras_are_imported_here_only():
    assert importers("keras.src") == {"strategies/keras_private.py"}
    assert importers("keras") > importers("keras.src"), "the search finds nothing"


@pytest.mark.parametrize("name", keras_private.__all__)
def test_they_are_modules_of_keras(name):
    module = getattr(keras_private, name)
    assert isinstance(module, types.ModuleType)
    assert module.__name__.startswith("keras.src")


def test_all_that_is_imported_is_named():
    assert sorted(keras_private.__all__) == sorted(
        name for name, value in vars(keras_private).items() if isinstance(value, types.ModuleType)
    )
