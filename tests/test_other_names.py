"""Names of other libraries, for which an error says what they are here."""

import importlib
import inspect
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
def test_errors_name_the_equivalent_in_tfdist(module, name, here):
    with pytest.raises(
        AttributeError, match=f"module '{module}' has no attribute '{name}'; its equivalent in tfdist is {here}"
    ):
        getattr(importlib.import_module(module), name)


def test_errors_about_arguments_name_the_equivalent():
    with pytest.raises(TypeError, match=r"all_reduce\(\) has no argument process_set=; its equivalent is group="):
        tfdist.all_reduce(1.0, process_set=None)
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(\) has no argument gradient_predivide_factor="):
        tfdist.DistributedOptimizer("sgd", gradient_predivide_factor=2.0)


def test_other_names_have_no_hint():
    with pytest.raises(AttributeError, match=r"module 'tfdist' has no attribute 'nothing'$"):
        tfdist.nothing  # noqa: B018


def test_named_equivalents_exist():
    for here in other_names._HERE.values():
        if here.startswith("tfdist."):
            name, *inner = re.split("[,(]", here)[0].removeprefix("tfdist.").split(".")
            equivalent = getattr(tfdist, name)
            for part in inner:
                equivalent = getattr(equivalent, part)


@pytest.mark.parametrize("name", [name for name in tfdist.__all__ if name.endswith("Strategy")])
def test_strategies_take_all_but_first_argument_by_name(name):
    first, *others = inspect.signature(getattr(tfdist, name)).parameters.values()
    assert (first.name, first.kind) == ("cluster_resolver", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
    others = {"stages": 2, "micro_batches": 2} if name == "PipelineStrategy" else {}
    with pytest.raises(TypeError, match=r"cluster_resolver must be .* got 'ring'. Pass all other arguments by name"):
        getattr(tfdist, name)("ring", **others)


@pytest.mark.parametrize(
    ("strategy", "name", "here"),
    [
        ("LocalSGDStrategy", "outer", r"rule=tfdist\.local_sgd\.Outer"),
        ("LocalSGDStrategy", "fragments", r"streaming=tfdist\.local_sgd\.Streaming"),
        ("ParameterServerStrategy", "replicas", r"servers=tfdist\.parameter_server\.Servers\(copies=1\)"),
    ],
)
def test_errors_name_equivalents_of_arguments(strategy, name, here):
    with pytest.raises(TypeError, match=rf"{strategy}\(\) has no argument {name}=; its equivalent is {here}"):
        getattr(tfdist, strategy)(**{name: 1})


def test_other_arguments_have_no_hint():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        tfdist.ParameterServerStrategy(nothing=1)


@pytest.mark.parametrize("module", ["strategies.servers.parameter_server", "strategies.rounds.local_sgd"])
def test_named_equivalents_of_arguments_exist(module):
    for here in importlib.import_module(f"tfdist.{module}")._ARGUMENTS.values():
        for path in re.findall(r"tfdist((?:\.\w+)+)", here):
            equivalent = tfdist
            for part in path[1:].split("."):
                equivalent = getattr(equivalent, part)
