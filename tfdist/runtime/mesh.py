"""A mesh: the processes of a job as a grid whose axes have names."""

from __future__ import annotations

from math import prod

from tfdist.runtime import world
from tfdist.runtime.groups import Group


class Mesh:
    """The processes that train together, as a grid whose axes have names, such as ``Mesh(data=2, model=4)``.

    Ranks are in row-major order: processes that are neighbours along the last axis have consecutive ranks, and so are
    on one machine, if each has several processes. Put the axis last along which most is sent.

    Args:
        axes: number of processes along each axis, in the order of the axes.

    Attributes:
        axes: as given, by name.

    Raises:
        ValueError: there is no axis, or a number is not an integer of at least 1.
    """

    def __init__(self, **axes: int) -> None:
        for name, length in axes.items():
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise ValueError(f"Mesh({name}=…) must be an integer of at least 1; got {length!r}")
        if not axes:
            raise ValueError("a mesh needs at least one axis, such as Mesh(data=2, model=2)")
        self.axes = dict(axes)

    @property
    def size(self) -> int:
        """Number of processes."""
        return prod(self.axes.values())

    def place(self, axis: str, rank: int) -> int:
        """Returns the place of a process along an axis.

        Args:
            axis: name of the axis.
            rank: rank of the process among those of the mesh.

        Raises:
            ValueError: there is no such axis.
        """
        return rank // self._stride(axis) % self.axes[axis]

    def along(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the processes along an axis through one process, in the order of their places.

        Args:
            axis: name of the axis.
            rank: rank of the process among those of the mesh.
        """
        first = rank - self.place(axis, rank) * self._stride(axis)
        return tuple(first + place * self._stride(axis) for place in range(self.axes[axis]))

    def across(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the processes with the same place along an axis as one process, in rising order.

        Args:
            axis: name of the axis.
            rank: rank of the process among those of the mesh.
        """
        return tuple(other for other in range(self.size) if self.place(axis, other) == self.place(axis, rank))

    def group(self, axis: str) -> Group:
        """Returns the processes along an axis through this one, for `tfdist.all_reduce` and the like.

        Args:
            axis: name of the axis.

        Raises:
            ValueError: there is no such axis, or the mesh has not all processes of the job.
        """
        entered = world.current()
        self.check_size(entered.size)
        return Group(self.along(axis, entered.rank))

    def check_size(self, processes: int) -> None:
        """Checks that the mesh has a number of processes.

        Args:
            processes: number of processes that train together.

        Raises:
            ValueError: the mesh has another number of processes.
        """
        if self.size != processes:
            product = " × ".join(f"{name}={length}" for name, length in self.axes.items())
            raise ValueError(
                f"{self} is for {self.size} processes ({product}), and {processes} train together: start {self.size} "
                f"processes, or choose axes whose product is {processes}"
            )

    def _stride(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"{self} has no axis {axis!r}; it has {', '.join(map(repr, self.axes))}")
        names = list(self.axes)
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={length}' for name, length in self.axes.items())})"
