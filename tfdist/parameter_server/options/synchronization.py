"""The modes of a parameter server: when an update is applied, and when a worker may read.

A worker's *clock* is the number of steps that it has pushed. A shard's *version* is the number of updates that it has
applied. Each server decides for its own shard; what holds for every shard holds for the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfdist import whole_numbers
from tfdist.parameter_server.options.concise import Concise
from tfdist.parameter_server.options.staleness import StalenessPolicy, Unscaled


class Synchronization(Concise):
    """Base of all modes: every gradient is an update, and nobody waits.

    Attributes:
        late: policy for late gradients.
    """

    late: StalenessPolicy = Unscaled()

    @property
    def in_rounds(self) -> bool:
        """Whether only gradients of one clock are averaged, and later ones are dropped."""
        return False

    @property
    def averages(self) -> bool:
        """Whether an update may average several gradients."""
        return False

    def quorum(self, members: int) -> int:
        """Returns the number of gradients that are averaged into one update.

        Args:
            members: number of live workers, at least 1.
        """
        return 1

    def lead(self) -> int | None:
        """Returns how many steps a worker may be ahead of the slowest live one when it reads; None for any number."""
        return None


@dataclass(frozen=True, repr=False)
class Asynchronous(Synchronization):
    """Every gradient is applied when it comes, and nobody waits.

    Attributes:
        late: policy for late gradients.

    References:
        Dean et al., *Large scale distributed deep networks*, NeurIPS 2012 (Downpour SGD).
    """

    late: StalenessPolicy = Unscaled()  # noqa: RUF009

    def __post_init__(self) -> None:
        _check_late(self)


@dataclass(frozen=True, repr=False)
class BoundedStaleness(Synchronization):
    """Stale synchronous parallel: a worker waits while it is more than ``steps`` ahead of the slowest live one.

    A read at clock c contains all updates with a clock below c − ``steps`` of every live worker that has not paused.

    Attributes:
        steps: maximum lead, at least 0. With 0, no worker reads before all have finished the step before.
        late: policy for late gradients.

    References:
        Ho et al., *More effective distributed ML via a stale synchronous parallel parameter server*, NeurIPS 2013.
    """

    steps: int
    late: StalenessPolicy = Unscaled()  # noqa: RUF009

    def __post_init__(self) -> None:
        whole_numbers.check("BoundedStaleness(steps=…)", self.steps, 0)
        _check_late(self)

    def lead(self) -> int | None:
        """Returns the bound, ``steps``."""
        return self.steps


@dataclass(frozen=True, repr=False)
class SoftSync(Synchronization):
    """n-softsync: with P live workers, every P / n gradients are averaged into one update.

    Attributes:
        n: divisor of P, at least 1. With 1, as many gradients as there are workers are averaged; P or more is
            `Asynchronous`.
        late: policy for late gradients.

    References:
        Zhang, Gupta, Lian and Liu, *Staleness-aware async-SGD for distributed deep learning*, IJCAI 2016.
    """

    n: int = 1
    late: StalenessPolicy = Unscaled()  # noqa: RUF009

    def __post_init__(self) -> None:
        whole_numbers.check("SoftSync(n=…)", self.n, 1)
        _check_late(self)

    @property
    def averages(self) -> bool:
        """Returns True: an update may average several gradients."""
        return True

    def quorum(self, members: int) -> int:
        """Returns the integer part of P / n, at least 1."""
        return max(1, members // self.n)


@dataclass(frozen=True, repr=False)
class Synchronous(Synchronization):
    """All workers take each step together: equal to one process that has the global batch.

    Attributes:
        backup_workers: number of workers that a step does not wait for; the gradients of the slowest are dropped.

    References:
        Chen et al., *Revisiting distributed synchronous SGD*, 2016 (backup workers).
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        whole_numbers.check("Synchronous(backup_workers=…)", self.backup_workers, 0)

    @property
    def in_rounds(self) -> bool:
        """Returns True: only gradients of the current step count."""
        return True

    @property
    def averages(self) -> bool:
        """Returns True: an update may average several gradients."""
        return True

    def quorum(self, members: int) -> int:
        """Returns the number of all but the backup workers, at least 1."""
        return max(1, members - self.backup_workers)

    def lead(self) -> int | None:
        """Returns 0: a worker reads when the step before has been applied."""
        return 0


def _check_late(mode: Synchronization) -> None:
    if isinstance(mode.late, type) or not isinstance(mode.late, StalenessPolicy):
        raise TypeError(
            f"{type(mode).__name__}(late=…) must be a policy such as Inverse() or DropBeyond(4); got {mode.late!r}"
        )
