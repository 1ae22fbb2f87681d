"""The user's settings for the start and the life of a job: deadlines and the secret."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path

from tfdist.errors import ClusterSpecError


@dataclass(frozen=True)
class Timeouts:
    """The deadlines for waits for other tasks, in seconds. Every wait ends.

    Each default can be set in the environment: ``TFDIST_START_TIMEOUT``, ``TFDIST_HEARTBEAT_TIMEOUT``,
    ``TFDIST_COLLECTIVE_TIMEOUT`` and ``TFDIST_STALL_TIMEOUT``.

    Attributes:
        start: seconds for all tasks to come to the rendezvous.
        heartbeat: seconds without a sign of life after which a task counts as lost, because its process is stopped or
            its link is cut. The death of a process is noticed at once.
        collective: seconds for all live ranks to take part in a collective.
        stall: seconds in a collective after which every rank logs which ranks are missing from which collectives.
            Nothing fails yet.
    """

    start: float = 300.0
    heartbeat: float = 60.0
    collective: float = 1800.0
    stall: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"Timeouts.{field.name} must be a number of seconds above 0; got {value!r}")

    @classmethod
    def from_environment(cls) -> Timeouts:
        """Returns the defaults, except for the deadlines that the environment sets."""
        given = {}
        for field in fields(cls):
            name = f"TFDIST_{field.name.upper()}_TIMEOUT"
            if name in os.environ:
                try:
                    given[field.name] = float(os.environ[name])
                    cls(**given)
                except ValueError:
                    raise ClusterSpecError(
                        f"{name} must be a number of seconds above 0; got {os.environ[name]!r}"
                    ) from None
        return cls(**given)

    @classmethod
    def of(cls, given: Timeouts | None) -> Timeouts:
        """Returns the deadlines that a program has given, or by default those of the environment.

        Args:
            given: the program's deadlines; None if it has given none.

        Raises:
            TypeError: ``given`` is neither `Timeouts` nor None.
        """
        if given is not None and not isinstance(given, cls):
            raise TypeError(f"timeouts must be tfdist.Timeouts, such as tfdist.Timeouts(start=300); got {given!r}")
        return cls.from_environment() if given is None else given


LEAST_SECRET_BYTES = 16
"""Minimum length in bytes of a secret that cannot easily be guessed by trying."""


def read_secret() -> bytes:
    """Returns the job's secret from ``TFDIST_SECRET`` or the file ``TFDIST_SECRET_FILE``; empty when neither is set.

    Raises:
        ClusterSpecError: the file cannot be read, is empty, or is readable for all users.
    """
    if secret := os.environ.get("TFDIST_SECRET"):
        return secret.encode("utf-8", "surrogateescape")
    if path := os.environ.get("TFDIST_SECRET_FILE"):
        try:
            is_for_all = Path(path).stat().st_mode & stat.S_IROTH
            secret_bytes = Path(path).read_bytes().strip()
        except OSError as error:
            raise ClusterSpecError(f"TFDIST_SECRET_FILE: cannot read {path}: {error.strerror}") from None
        if is_for_all:
            raise ClusterSpecError(
                f"TFDIST_SECRET_FILE: every user can read {path}, so it keeps no secret. Run `chmod o= {path}`, or set "
                "defaultMode: 0440 for a volume of Kubernetes"
            )
        if not secret_bytes:
            raise ClusterSpecError(f"TFDIST_SECRET_FILE: {path} is empty; it must hold the job's secret")
        return secret_bytes
    return b""
