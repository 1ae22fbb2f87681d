"""The users' groups, which are named by ranks of the job."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from tfdist.runtime import world


class Group:
    """A subset of the processes, which take part in a collective without the others.

    Args:
        ranks: ranks of the members, in the order of the group; the same on every member.

    Raises:
        ValueError: a rank does not exist or occurs twice, or ``ranks`` is empty.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            self.ranks = tuple(operator.index(rank) for rank in ranks)
        except TypeError:
            raise TypeError(f"a group takes the ranks of its members, such as [0, 1]; got {ranks!r}") from None
        size = world.current().size
        if not self.ranks or len(set(self.ranks)) < len(self.ranks) or not all(0 <= r < size for r in self.ranks):
            raise ValueError(
                f"a group must have one or more ranks from 0 to {size - 1}, each once; got {list(self.ranks)}. If this "
                "process has not entered its job yet, call tfdist.init() first."
            )

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's place among the members.

        Raises:
            ValueError: this process is not a member.
        """
        return self.members().index(world.current().rank)

    def members(self) -> tuple[int, ...]:
        """Returns the members' ranks, if this process is a member.

        Raises:
            ValueError: this process is not a member.
        """
        rank = world.current().rank
        if rank not in self.ranks:
            raise ValueError(
                f"rank {rank} is not in {self}: only its members may use it. Guard the call with "
                "`if tfdist.rank() in group.ranks:`."
            )
        return self.ranks

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"
