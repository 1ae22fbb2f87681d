"""The options of `ParameterServerStrategy` that all tasks of a job have alike, as they are published and compared."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import msgspec

from tfdist import compression
from tfdist.errors import MismatchError, TfdistError
from tfdist.parameter_server.options import per_host, pushes, servers, staleness, synchronization
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.concise import text_of
from tfdist.parameter_server.options.expressions import ExpressionError, read

_KNOWN = {
    name: getattr(module, name)
    for module, names in (
        (synchronization, "Asynchronous BoundedStaleness SoftSync Synchronous"),
        (staleness, "Unscaled Inverse Exponential DropBeyond DelayCompensated"),
        (pushes, "Gradients LocalSteps ElasticAveraging Hogwild"),
        (servers, "Servers"),
        (per_host, "PerHost"),
        (compression, " ".join(set(compression.__all__) - {"Method", "Policy", "Route", "State"})),
    )
    for name in names.split()
}

_COMPARED = ("synchronization", "pushes", "servers", "data")


class Options(msgspec.Struct, frozen=True):
    """Options as text. What a text says is `tfdist.parameter_server.options.expressions`' matter.

    Attributes:
        synchronization: as the strategy's argument.
        pushes: as the strategy's argument.
        servers: as the strategy's argument, without snapshots: their folder is the servers' matter.
        data: as the strategy's argument.
        snapshots: their folder; None for none.
        snapshot_seconds: between two.
        own: names of the options whose value, or a part of it, is of a class of the user's.
    """

    synchronization: str
    pushes: str
    servers: str
    data: str
    snapshots: str | None = None
    snapshot_seconds: float = 60.0
    own: tuple[str, ...] = ()

    def encode(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()

    def arguments(self) -> Arguments:
        """The arguments that the text describes.

        Raises:
            TfdistError: one is of a class of the user's.
        """
        servers = dataclasses.replace(
            self.made("servers"), snapshots=self.snapshots, snapshot_seconds=self.snapshot_seconds
        )
        return Arguments(self.made("synchronization"), self.made("pushes"), servers, self.data)

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


def of(arguments: Arguments) -> Options:
    """Describes the arguments of a strategy as text.

    Args:
        arguments: the arguments of this task's strategy.
    """
    servers = arguments.servers
    alike = dataclasses.replace(servers, snapshots=None, snapshot_seconds=60.0)
    values = {"synchronization": arguments.synchronization, "pushes": arguments.pushes, "servers": alike}
    return Options(
        **{name: text_of(value) for name, value in values.items()},
        data=arguments.data,
        snapshots=None if servers.snapshots is None else os.fspath(servers.snapshots),
        snapshot_seconds=servers.snapshot_seconds,
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
    for name in _COMPARED:
        mine, its = str(getattr(own, name))[:200], str(getattr(other, name))[:200]
        if getattr(own, name) != getattr(other, name):
            raise MismatchError(
                f"ParameterServerStrategy has {name}={mine} on this task, and {name}={its} on {task}. Give it the same "
                "arguments on every task."
            )


def _is_tfdists(value: Any) -> bool:
    try:
        return _is_same(read(repr(value), _KNOWN), value)
    except ExpressionError:
        return False


def _is_same(made: Any, value: Any) -> bool:
    """Whether what a text says is what it was made of: a user's class may have the text of one of tfdist's."""
    if type(made) is not type(value) or repr(made) != repr(value):
        return False
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return all(_is_same(getattr(made, field.name), getattr(value, field.name)) for field in fields)
