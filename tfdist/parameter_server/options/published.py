"""The options of `ParameterServerStrategy` as text, which the tasks of a job publish and compare."""

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
    """Options as text, which `tfdist.parameter_server.options.expressions` reads.

    Attributes:
        synchronization: text of the strategy's argument.
        pushes: text of the strategy's argument.
        servers: text of the strategy's argument without snapshots, which only servers need and tasks do not compare.
        data: the strategy's argument.
        snapshots: folder of the snapshots; None for no snapshots.
        snapshot_seconds: seconds between two snapshots.
        own: names of the options whose value, or a part of it, is of a user-defined class.
        floatx: Keras's default dtype, which an optimizer's learning rate has.
    """

    synchronization: str
    pushes: str
    servers: str
    data: str
    snapshots: str | None = None
    snapshot_seconds: float = 60.0
    own: tuple[str, ...] = ()
    floatx: str = "float32"

    def encode(self) -> str:
        """Returns the options as one text."""
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
        """Returns the value of an option.

        Args:
            name: name of the option.

        Raises:
            TfdistError: the value is of a user-defined class.
        """
        if name not in self.own:
            try:
                return read(getattr(self, name), _KNOWN)
            except ExpressionError:
                pass
        raise TfdistError(
            f"{name} is {getattr(self, name)[:200]} in the workers' script, an object of a class that is not tfdist's "
            "own, which `tfdist serve` cannot make. Run the script on the parameter servers, too."
        )


def describe(arguments: Arguments, floatx: str = "float32") -> Options:
    """Describes the arguments of a strategy as text.

    Args:
        arguments: the arguments of this task's strategy.
        floatx: Keras's default dtype in this task.
    """
    servers = arguments.servers
    alike = dataclasses.replace(servers, snapshots=None, snapshot_seconds=60.0)
    values = {"synchronization": arguments.synchronization, "pushes": arguments.pushes, "servers": alike}
    return Options(
        **{name: text_of(value) for name, value in values.items()},
        data=arguments.data,
        snapshots=None if servers.snapshots is None else os.fspath(servers.snapshots),
        snapshot_seconds=servers.snapshot_seconds,
        own=tuple(name for name, value in values.items() if not _is_library_class(value)),
        floatx=floatx,
    )


def decode(text: str) -> Options:
    """Decodes what `Options.encode` has returned.

    Raises:
        TfdistError: the text is not valid.
    """
    try:
        return msgspec.json.decode(text, type=Options)
    except msgspec.DecodeError as error:
        raise TfdistError(f"a task has published invalid options: {error}") from None


def check_equal(own: Options, other: Options, task: str) -> None:
    """Checks that this task's options equal those of another task.

    Args:
        own: options of this task.
        other: options of the other task.
        task: name of the other task.

    Raises:
        MismatchError: the options differ.
    """
    for name in _COMPARED:
        mine, its = str(getattr(own, name))[:200], str(getattr(other, name))[:200]
        if getattr(own, name) != getattr(other, name):
            raise MismatchError(
                f"ParameterServerStrategy has {name}={mine} on this task, and {name}={its} on {task}. Give it the same "
                "arguments on every task."
            )


def _is_library_class(value: Any) -> bool:
    try:
        return _is_same(read(repr(value), _KNOWN), value)
    except ExpressionError:
        return False


def _is_same(made: Any, value: Any) -> bool:
    """Returns whether what was read from a text equals the original: a user's class may have the text of tfdist's."""
    if type(made) is not type(value) or repr(made) != repr(value):
        return False
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return all(_is_same(getattr(made, field.name), getattr(value, field.name)) for field in fields)
