import types

import pytest

from tests.private.private_modules import importers
from tfdist.private import keras as private


def test_private_modules_of_keras_are_imported_here_only():
    assert importers("keras.src") == {"private/keras.py"}
    assert importers("keras") > importers("keras.src"), "the search finds nothing"


@pytest.mark.parametrize("name", private.__all__)
def test_exported_names_are_modules_of_keras(name):
    module = getattr(private, name)
    assert isinstance(module, types.ModuleType)
    assert module.__name__.startswith("keras.src")


def test_all_lists_every_imported_module():
    assert sorted(private.__all__) == sorted(
        name for name, value in vars(private).items() if isinstance(value, types.ModuleType)
    )
