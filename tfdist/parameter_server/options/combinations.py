"""Options of `tfdist.ParameterServerStrategy` that exclude each other: one table, for the check and for the docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronization


class GivenArguments(Protocol):
    """The arguments that are checked, as the strategy takes them."""

    @property
    def synchronization(self) -> Synchronization:
        """When servers apply updates."""

    @property
    def pushes(self) -> Any:
        """What workers push."""

    @property
    def servers(self) -> Any:
        """How servers keep their state."""

    @property
    def data(self) -> str:
        """Whose data workers train on."""


class _Choice(NamedTuple):
    """A choice that a user may have made.

    Attributes:
        label: name of the choice in the docs.
        argument: name of the strategy's argument.
        is_made: function that returns whether the user has made this choice.
    """

    label: str
    argument: str
    is_made: Callable[[GivenArguments], bool]


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


def _of_gradients(name: str) -> Callable[[GivenArguments], bool]:
    default = getattr(Gradients(), name)
    return lambda given: isinstance(given.pushes, Gradients) and bool(getattr(given.pushes, name) != default)


_OWN_UPDATES = _Choice(
    "`LocalSteps`, `ElasticAveraging`, `Hogwild`",
    "pushes",
    lambda given: isinstance(given.pushes, LocalSteps | ElasticAveraging | Hogwild),
)
_HOGWILD = _Choice("`Hogwild`", "pushes", lambda given: isinstance(given.pushes, Hogwild))
_ELASTIC = _Choice("`ElasticAveraging`", "pushes", lambda given: isinstance(given.pushes, ElasticAveraging))
_COMPRESSED = _Choice("`Gradients(compression=…)`", "pushes", _of_gradients("compression"))
_PARAMETERS = _Choice("`Gradients(parameters=…)`", "pushes", _of_gradients("parameters"))
_PREFETCH = _Choice("`Gradients(prefetch=1)`", "pushes", _of_gradients("prefetch"))
_SHARED = _Choice('`data="shared"`', "data", lambda given: given.data == "shared")
_ROUNDS = _Choice("`Synchronous`", "synchronization", lambda given: given.synchronization.in_rounds)
_AVERAGES = _Choice("`SoftSync`, `Synchronous`", "synchronization", lambda given: given.synchronization.averages)
_COMPENSATED = _Choice(
    "`late=DelayCompensated(…)`",
    "synchronization",
    lambda given: isinstance(given.synchronization.late, DelayCompensated),
)
_OTHER_MODES = _Choice(
    "all modes but `Asynchronous()`", "synchronization", lambda given: given.synchronization != Asynchronous()
)
_COPIES = _Choice(
    "`Servers(copies=1)`", "servers", lambda given: isinstance(given.servers, Servers) and given.servers.copies > 0
)
_PER_HOST = _Choice("`PerHost`", "servers", lambda given: isinstance(given.servers, PerHost))

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


def check(given: GivenArguments) -> None:
    """Checks that arguments go together.

    Args:
        given: the arguments of the strategy.

    Raises:
        ValueError: two options exclude each other.
    """
    for one, other, why in EXCLUSIONS:
        if one.is_made(given) and other.is_made(given):
            shown = [f"{choice.argument}={getattr(given, choice.argument)!r}" for choice in (one, other)]
            raise ValueError(f"{shown[0]} does not go with {shown[1]}: {why}. Leave one of the two out.")


def table() -> str:
    """Returns the exclusions as a Markdown table for the docs."""
    rows = [f"| {one.label} | {other.label} | {why} |" for one, other, why in EXCLUSIONS]
    return "\n".join(["| this | does not go with | because |", "|---|---|---|", *rows])
