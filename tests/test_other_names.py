"""Names of other libraries, for which an error says what they are here."""

import importlib
import re

import pytest

import tfdist
from tfdist import other_names


@pytest.mark.parametrize(
    ("module", "name", "here"),
    [
        ("tfdist", "allreduce", "tfdist.all_reduce"),
        ("tfdist", "MultiWorkerMirroredStrategy", "tfdist.AllReduceStrategy"),
        ("tfdist.callbacks", "BroadcastGlobalVariablesCallback", "tfdist.callbacks.BroadcastVariables"),
    ],
)
def test_errors_say_what_it_is_here(module, name, here):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'; here it is {here}"):
        getattr(importlib.import_module(module), name)


def test_other_names_have_no_hint():
    with pytest.raises(AttributeError, match=r"module 'tfdist' has no attribute 'nothing'$"):
        tfdist.nothing  # noqa: B018


def test_what_is_named_exists():
    for here in other_names._HERE.values():
        if here.startswith("tfdist."):
            name, *inner = re.split("[,(]", here)[0].removeprefix("tfdist.").split(".")
            found = getattr(tfdist, name)
            for part in inner:
                found = getattr(found, part)
