"""The group of processes that all code above the engine works with."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.collectives import algorithms
from tfdist.collectives.cost import Calibration
from tfdist.collectives.schedule import Plan
from tfdist.comm.shared import SharedMemory
from tfdist.engine.engine import Engine
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending, Site
from tfdist.errors import TfdistError


class ProcessGroup:
    """An ordered set of processes, seen from one of its members.

    Each collective has a key. Keys belong to the group: groups of other members may use the same keys.

    Args:
        engine: the engine that runs the collectives.
        members: ranks of the members in the job, including this process, in the order of the group; all by default.
        algorithm: name of the all-reduce algorithm.
        calibration: measured costs by which ``"auto"`` chooses an algorithm.

    Attributes:
        engine: this process's engine.
        members: ranks in the job, by rank in the group.
        rank: this process's rank in the group.
        size: number of members.
        hosts: number of each member's machine, by rank in the group.
        is_world: whether the group has all processes, in the order of their ranks.
        algorithm: name of the all-reduce algorithm.
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
        """Whether this process writes the files that only one process writes."""
        return self.rank == 0

    @property
    def failure(self) -> TfdistError | None:
        """The error because of which no collective of the group can complete any more; None if there is none."""
        return self.engine.failure_of(self.members)

    def using(self, algorithm: str, calibration: Calibration | None) -> ProcessGroup:
        """Returns the same group with another all-reduce algorithm.

        Args:
            algorithm: name of the algorithm.
            calibration: measured costs by which ``"auto"`` chooses an algorithm.

        Raises:
            ValueError: there is no such algorithm, or it is not for groups.
        """
        return ProcessGroup(self.engine, self.members, algorithm, calibration)

    def subgroup(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Returns a group of some of the members, in the given order.

        Args:
            ranks: ranks in this group, including this process's.
        """
        return ProcessGroup(self.engine, tuple(self.members[rank] for rank in ranks), self.algorithm, self._calibration)

    def number(self, kind: str) -> int:
        """Counts objects of one kind, which all members make in the same order.

        Args:
            kind: name of the kind, such as ``"strategy"``.

        Returns:
            The number of objects that were made before.
        """
        return self.engine.numbers.count(self.members, kind)

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

    def wait(self, pending: Pending) -> Any:
        """Waits for a collective and returns its result; see `tfdist.engine.engine.Engine.wait`."""
        return self.engine.wait(pending)

    def check(self) -> None:
        """Raises an error if no collective of the group can complete; see `tfdist.engine.engine.Engine.check`."""
        self.engine.check(self.members)

    def join(self) -> int:
        """Takes part, without data, until all processes have joined; see `tfdist.engine.engine.Engine.join`."""
        return self.engine.join()

    def site(self, key: str) -> Site:
        """Returns the call site of a key, as the engine names it."""
        return self._given, key

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that the members sum in; None, on all members alike, if they do not share it.

        Its sums have one algorithm.
        """
        memory = self.engine.communicator.memory if self.algorithm == "auto" else None
        return memory if memory and memory.is_summed(self.members) else None

    @property
    def _given(self) -> tuple[int, ...] | None:
        return None if self.is_world else self.members

    def take(self, nbytes: int) -> np.ndarray:
        """Returns uninitialized aligned memory that is quick to send from."""
        return self.engine.communicator.take(nbytes)

    def choose(self, nbytes: int) -> str:
        """Returns the all-reduce algorithm for a number of bytes."""
        return algorithms.choose(self.algorithm, self.hosts, nbytes, self._calibration)

    def choose_in_turn(self, nbytes: int) -> str:
        """Returns an all-reduce algorithm for one of several steps of a collective, where ``"mpi"`` is not possible."""
        algorithm = self.choose(nbytes)
        return "ring" if algorithm == "mpi" else algorithm
