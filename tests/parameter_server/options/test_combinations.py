"""Options that do not go together."""

from pathlib import Path

import pytest

from tfdist.compression import Int8
from tfdist.parameter_server import (
    Asynchronous,
    BoundedStaleness,
    DelayCompensated,
    ElasticAveraging,
    Gradients,
    Hogwild,
    Inverse,
    LocalSteps,
    PerHost,
    Servers,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.options import combinations
from tfdist.parameter_server.options.arguments import Arguments

DOCS = Path(__file__).parents[3] / "docs" / "parameter_server_pushes.md"
COMPENSATED = Asynchronous(DelayCompensated(0.1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pushes": Gradients(prefetch=1), "synchronization": Synchronous()},
            r"pushes=Gradients\(prefetch=1\) does not",
        ),
        *(
            ({"pushes": pushes, "data": "shared"}, "use data=")
            for pushes in (LocalSteps(2), ElasticAveraging(), Hogwild())
        ),
        (
            {"pushes": Gradients(parameters=Int8()), "synchronization": COMPENSATED},
            "servers send parameters that differ from their own",
        ),
        ({"pushes": LocalSteps(2), "synchronization": COMPENSATED}, "workers push no gradients"),
        (
            {"pushes": ElasticAveraging(), "synchronization": SoftSync()},
            r"synchronization=SoftSync\(\): each push moves",
        ),
        ({"pushes": Hogwild(), "synchronization": BoundedStaleness(2)}, "servers do not see updates"),
        ({"pushes": Hogwild(), "synchronization": Asynchronous(Inverse())}, r"Asynchronous\(late=Inverse\(\)\)"),
        ({"pushes": Hogwild(), "servers": Servers(copies=1)}, "could be copied"),
        ({"servers": PerHost(), "data": "shared"}, "joins gradients"),
        ({"servers": PerHost(), "pushes": LocalSteps(2)}, "joins gradients"),
        ({"servers": PerHost(), "pushes": Gradients(Int8())}, "joins gradients"),
        ({"servers": PerHost(), "pushes": Gradients(parameters=Int8())}, "joins gradients"),
        ({"servers": PerHost(), "synchronization": COMPENSATED}, "joins gradients"),
    ],
)
def test_incompatible_options_raise(given, message):
    with pytest.raises(ValueError, match=f"{message}.*Leave one of the two out"):
        Arguments(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pushes": Gradients(Int8(), Int8(), 1, "lazy"), "synchronization": BoundedStaleness(2, Inverse())},
        {"pushes": LocalSteps(2, Int8()), "synchronization": Synchronous(1), "servers": Servers(copies=1)},
        {"pushes": Hogwild(), "servers": Servers(snapshots="a")},
        {"servers": PerHost(snapshots="a"), "pushes": Gradients(prefetch=1, sparse="lazy")},
        {"data": "shared", "pushes": Gradients(Int8()), "servers": Servers(copies=1), "synchronization": Synchronous()},
    ],
)
def test_compatible_options_are_accepted(given):
    Arguments(**given)


def test_docs_contain_the_table_of_combinations():
    assert combinations.table() in DOCS.read_text()
