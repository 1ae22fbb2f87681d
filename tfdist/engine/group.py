"""Some or all of the processes, in an order of their own: what everything above the engine is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.collectives import algorithms
from tfdist.collectives.cost import Calibration
from tfdist.collectives.schedule import Plan
from tfdist.engine.engine import Engine
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.errors import TfdistError


class Group:
    """An ordered set of processes, seen from one of its members.

    What it is asked to do is known by a key, which is the group's own: groups of other members may use the same keys.

    Args:
        engine: runs the collectives.
        members: ranks of the engine's processes, this one's among them, in the order of the group; all by default.
        algorithm: of its all-reduces.
        calibration: by which ``"auto"`` chooses.

    Attributes:
        engine: of this process.
        members: ranks of the job, by rank in the group.
        rank: this process's place in the group.
        size: number of members.
        hosts: by rank, a number for the machine that it runs on.
        algorithm: the name of its all-reduce.
    """

    def __init__(
        self,
        engine: Engine,
        members: tuple[int, ...] | None = None,
        algorithm: str = "ring",
        calibration: Calibration | None = None,
    ) -> None:
        everyone = tuple(range(engine.size))
        self.engine = engine
        self.members = everyone if members is None else members
        self.rank = self.members.index(engine.rank)
        self.size = len(self.members)
        self.hosts = tuple(engine.communicator.hosts[member] for member in self.members)
        self.is_world = self.members == everyone
        algorithms.check(algorithm, group=not self.is_world)
        self.algorithm = algorithm
        self._calibration = calibration

    def __repr__(self) -> str:
        return f"Group({list(self.members)})"

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def failure(self) -> TfdistError | None:
        """Why no collective of the group can complete any more, if that is so."""
        return self.engine.failure_of(self.members)

    def using(self, algorithm: str, calibration: Calibration | None) -> Group:
        """The same group with another all-reduce.

        Args:
            algorithm: its name.
            calibration: by which ``"auto"`` chooses.

        Raises:
            ValueError: there is no such algorithm, or it is not for groups.
        """
        return Group(self.engine, self.members, algorithm, calibration)

    def subgroup(self, ranks: tuple[int, ...]) -> Group:
        """Some of the members, this process among them, in their given order.

        Args:
            ranks: of this group.
        """
        return Group(self.engine, tuple(self.members[rank] for rank in ranks), self.algorithm, self._calibration)

    def number(self, kind: str) -> int:
        """Counts the things of one kind that these members make, all of them in the same order.

        Args:
            kind: of thing, such as ``"strategy"``.

        Returns:
            How many were made before.
        """
        return self.engine.count(self.members, kind)

    # Collectives.

    def run(
        self,
        key: str,
        plan: Plan | Operation,
        signature: str = "",
        *,
        contents: str = "",
    ) -> Any:
        """Runs a collective to its end, from eager code; see `tfdist.engine.engine.Engine.run`."""
        return self.engine.run(key, plan, signature, members=self._given, contents=contents)

    def post(
        self,
        key: str,
        plan: Plan | Operation,
        signature: str = "",
        *,
        overlaps: bool = True,
        contents: str = "",
        ready: float | None = None,
        patient: bool = False,
    ) -> Pending:
        """Begins a collective and returns at once; see `tfdist.engine.engine.Engine.post`."""
        return self.engine.post(
            key,
            plan,
            signature,
            overlaps=overlaps,
            members=self._given,
            contents=contents,
            ready=ready,
            patient=patient,
        )

    def wait(self, pending: Pending, blocking: bool = False) -> Any:
        """Waits for a collective and returns its result; see `tfdist.engine.engine.Engine.wait`."""
        return self.engine.wait(pending, blocking)

    def check(self) -> None:
        """Raises why no collective of the group can complete any more; see `tfdist.engine.engine.Engine.check`."""
        self.engine.check(self.members)

    def join(self) -> int:
        """Takes part, without data, until all processes have joined; see `tfdist.engine.engine.Engine.join`."""
        return self.engine.join()

    @property
    def _given(self) -> tuple[int, ...] | None:
        return None if self.is_world else self.members

    def take(self, nbytes: int) -> np.ndarray:
        """Uninitialized aligned memory that is quick to send from."""
        return self.engine.communicator.take(nbytes)

    def choose(self, nbytes: int) -> str:
        """The all-reduce for so many bytes."""
        return algorithms.choose(self.algorithm, self.hosts, nbytes, self._calibration)

    def choose_in_turn(self, nbytes: int) -> str:
        """An all-reduce for one of several steps of a collective, which the library's own cannot be."""
        algorithm = self.choose(nbytes)
        return "ring" if algorithm == "mpi" else algorithm
