"""Wrappers that stand around each other, on functions that are this file's own."""

import functools
import types

import pytest

from tfdist.seams import order, registry
from tfdist.seams.registry import replace


@pytest.fixture
def owner(monkeypatch):
    monkeypatch.setattr(registry, "_seams", {})

    class Owner:
        def told(self, what):
            """Says what it was given."""
            return [what]

    return Owner


def wrapper(name, module):
    """Notes that it was passed, as one of a module."""

    def around(original):
        def told(self, what):
            return [name, *original(self, what)]

        return told

    around.__module__ = around.__qualname__ = module
    return around


def test_wrappers_stack_in_feature_order_not_installation_order(owner):
    inner, outer = "tfdist.strategies.keras.keras_steps", "tfdist.pipeline.keras_pipelines"
    assert order.place_of(inner) < order.place_of(outer) < order.place_of("somewhere.else")
    for name, module in [("c", outer), ("a", inner), ("d", "else"), ("b", inner), ("e", "else")]:
        replace(owner, "told", wrapper(name, module))
    assert owner().told(1) == ["e", "d", "c", "b", "a", 1]
    assert owner.told.__doc__ == "Says what it was given."
    (entry,) = registry.standing().items()
    assert entry[0] == "Owner.told"
    assert [path.split(".")[0] for path in entry[1]] == ["else", "else", "pipeline", "strategies", "strategies"]


def test_later_wrappers_of_other_libraries_are_kept(owner):
    replace(owner, "told", wrapper("a", "x"))
    before = owner.told
    owner.told = lambda self, what: ["others", *before(self, what)]
    replace(owner, "told", wrapper("b", "tfdist.strategies.keras.keras_seams"))
    assert owner().told(1) == ["b", "others", "a", 1]


def test_module_functions_take_partial_wrappers():
    module = types.ModuleType("some.module")
    module.double = lambda value: 2 * value
    replace(module, "double", functools.partial(lambda by, original: lambda value: by + original(value), 100))
    assert module.double(4) == 108
    assert [name for name in registry.standing() if name.startswith("module.")] == ["module.double"]
