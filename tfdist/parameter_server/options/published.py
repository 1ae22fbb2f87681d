"""The options of `ParameterServerStrategy` that all tasks of a job have alike, as they are published and compared."""

from __future__ import annotations

from typing import Any

import msgspec

from tfdist import compression
from tfdist.compression.policy import Policy
from tfdist.errors import MismatchError, TfdistError
from tfdist.parameter_server.options import per_host, pushes, staleness, synchronization
from tfdist.parameter_server.options.expressions import ExpressionError, read
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.staleness import StalenessPolicy
from tfdist.parameter_server.options.synchronization import Synchronization

_KNOWN = {
    name: getattr(module, name)
    for module, names in (
        (synchronization, "Asynchronous BoundedStaleness SoftSync Synchronous"),
        (staleness, "AsItIs Inverse Exponential DropBeyond DelayCompensated"),
        (pushes, "LocalSteps ElasticAveraging Hogwild"),
        (per_host, "PerHost"),
        (compression, " ".join(set(compression.__all__) - {"Method", "Policy", "Route", "State"})),
    )
    for name in names.split()
}

_COMPARED = ("synchronization", "staleness_policy", "data", "pushes", "compression", "pull_compression", "hierarchy")


class Options(msgspec.Struct, frozen=True):
    """Options as text. What a text says is `tfdist.parameter_server.options.expressions`' matter.

    Attributes:
        synchronization: as the strategy's argument.
        staleness_policy: as the strategy's argument.
        data: as the strategy's argument.
        pushes: as the strategy's argument.
        compression: the policy.
        pull_compression: the policy.
        sparse: as the strategy's argument.
        replicas: as the strategy's argument.
        snapshots: their folder; None for none.
        snapshot_seconds: as the strategy's argument.
        hierarchy: as the strategy's argument.
        own: names of the options whose value is of a class of the user's.
    """

    synchronization: str
    staleness_policy: str
    data: str
    pushes: str
    compression: str
    pull_compression: str = "None"
    sparse: str = "exact"
    replicas: int = 1
    snapshots: str | None = None
    snapshot_seconds: float = 60.0
    hierarchy: str = "None"
    own: tuple[str, ...] = ()

    def encode(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()

    def made(self, name: str) -> Any:
        """The value of an option.

        Args:
            name: of the option.

        Raises:
            TfdistError: it is of a class of the user's.
        """
        if name not in self.own:
            try:
                return read(getattr(self, name), _KNOWN)
            except ExpressionError:
                pass
        raise TfdistError(
            f"{name} is {getattr(self, name)[:200]} in the workers' script, of a class that is not tfdist's own: "
            "`tfdist serve` cannot have it. Run the script on the parameter servers, too."
        )


def of(
    synchronization: Synchronization,
    staleness_policy: StalenessPolicy,
    data: str,
    pushes: Any,
    compression: Policy | None,
    pull_compression: Policy | None,
    sparse: str,
    replicas: int,
    snapshots: str | None,
    snapshot_seconds: float,
    hierarchy: PerHost | None = None,
) -> Options:
    """Describes options.

    Args:
        synchronization: as the strategy's argument.
        staleness_policy: as the strategy's argument.
        data: as the strategy's argument.
        pushes: as the strategy's argument.
        compression: the policy.
        pull_compression: the policy.
        sparse: as the strategy's argument.
        replicas: as the strategy's argument.
        snapshots: as the strategy's argument.
        snapshot_seconds: as the strategy's argument.
        hierarchy: as the strategy's argument.
    """
    given = synchronization, staleness_policy, data, pushes, compression, pull_compression, hierarchy
    values = dict(zip(_COMPARED, given, strict=True))
    return Options(
        **{name: _text(value) for name, value in values.items()},
        sparse=sparse,
        replicas=replicas,
        snapshots=snapshots,
        snapshot_seconds=snapshot_seconds,
        own=tuple(name for name, value in values.items() if not _is_tfdists(value)),
    )


def decode(text: str) -> Options:
    """Options from what `Options.encode` yields.

    Raises:
        TfdistError: it is no such text.
    """
    try:
        return msgspec.json.decode(text, type=Options)
    except msgspec.DecodeError as error:
        raise TfdistError(f"a task has published invalid options: {error}") from None


def check_equal(own: Options, other: Options, task: str) -> None:
    """Compares a task's options with another's.

    Args:
        own: of this task.
        other: of the other task.
        task: the other's name.

    Raises:
        MismatchError: they differ.
    """
    for name in (*_COMPARED, "sparse", "replicas"):
        mine, its = str(getattr(own, name))[:200], str(getattr(other, name))[:200]
        if getattr(own, name) != getattr(other, name):
            raise MismatchError(
                f"ParameterServerStrategy has {name}={mine} on this task, and {name}={its} on {task}. Give it the same "
                "arguments on every task."
            )


def _is_tfdists(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    try:
        made = read(repr(value), _KNOWN)
    except ExpressionError:
        return False
    return type(made) is type(value) and repr(made) == repr(value)


def _text(value: Any) -> str:
    """A value as text that is equal on all tasks; a default `repr` has an address."""
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else repr(value)
