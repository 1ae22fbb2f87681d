"""Options of `tfdist.ParameterServerStrategy` that exclude each other: one table, for the check and for the docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.options.synchronization import Asynchronous


class _Choice(NamedTuple):
    """A choice that a user may have made.

    Attributes:
        label: name of the choice in the docs.
        argument: name of the strategy's argument.
        is_made: function that returns whether a value of the argument is this choice.
    """

    label: str
    argument: str
    is_made: Callable[[Any], bool]


class Exclusion(NamedTuple):
    """Two choices that exclude each other.

    Attributes:
        one: first choice.
        other: second choice.
        why: reason.
    """

    one: _Choice
    other: _Choice
    why: str


def _of_gradients(name: str) -> Callable[[Any], bool]:
    default = getattr(Gradients(), name)
    return lambda pushes: isinstance(pushes, Gradients) and bool(getattr(pushes, name) != default)


_OWN_UPDATES = _Choice(
    "`LocalSteps`, `ElasticAveraging`, `Hogwild`",
    "pushes",
    lambda pushes: isinstance(pushes, LocalSteps | ElasticAveraging | Hogwild),
)
_HOGWILD = _Choice("`Hogwild`", "pushes", lambda pushes: isinstance(pushes, Hogwild))
_ELASTIC = _Choice("`ElasticAveraging`", "pushes", lambda pushes: isinstance(pushes, ElasticAveraging))
_COMPRESSED = _Choice("`Gradients(compression=…)`", "pushes", _of_gradients("compression"))
_PARAMETERS = _Choice("`Gradients(parameters=…)`", "pushes", _of_gradients("parameters"))
_PREFETCH = _Choice("`Gradients(prefetch=1)`", "pushes", _of_gradients("prefetch"))
_SHARED = _Choice('`data="shared"`', "data", lambda data: data == "shared")
_ROUNDS = _Choice("`Synchronous`", "synchronization", lambda mode: mode.in_rounds)
_AVERAGES = _Choice("`SoftSync`, `Synchronous`", "synchronization", lambda mode: mode.averages)
_COMPENSATED = _Choice(
    "`late=DelayCompensated(…)`",
    "synchronization",
    lambda mode: isinstance(mode.late, DelayCompensated),
)
_OTHER_MODES = _Choice("all modes but `Asynchronous()`", "synchronization", lambda mode: mode != Asynchronous())
_COPIES = _Choice("`Servers(copies=1)`", "servers", lambda servers: isinstance(servers, Servers) and servers.copies > 0)
_PER_HOST = _Choice("`PerHost`", "servers", lambda servers: isinstance(servers, PerHost))

EXCLUSIONS = (
    Exclusion(_PREFETCH, _ROUNDS, "a step begins only when the update of the step before has been applied"),
    Exclusion(
        _SHARED,
        _OWN_UPDATES,
        'the batches of each push of gradients are counted; use data="own", and give each worker its part of the data, '
        "such as dataset.shard(strategy.size, strategy.rank)",
    ),
    Exclusion(_PARAMETERS, _COMPENSATED, "servers send parameters that differ from their own"),
    Exclusion(_OWN_UPDATES, _COMPENSATED, "it corrects gradients, and workers push no gradients"),
    Exclusion(_ELASTIC, _AVERAGES, "each push moves the servers' values by itself"),
    Exclusion(_HOGWILD, _OTHER_MODES, "servers do not see updates, so they can neither delay nor scale them"),
    Exclusion(_HOGWILD, _COPIES, "it sends no messages that could be copied"),
    *(
        Exclusion(_PER_HOST, other, "the server of a host joins gradients into one push")
        for other in (_SHARED, _OWN_UPDATES, _COMPRESSED, _PARAMETERS, _COMPENSATED)
    ),
)


def table() -> str:
    """Returns the exclusions as a Markdown table for the docs."""
    rows = [f"| {one.label} | {other.label} | {why} |" for one, other, why in EXCLUSIONS]
    return "\n".join(["| this | does not go with | because |", "|---|---|---|", *rows])
