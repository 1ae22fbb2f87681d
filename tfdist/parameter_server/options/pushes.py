"""What a worker pushes: gradients, of which servers make updates, or what its own optimizer has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfdist.compression.policy import Choice, Policy, Schedule, as_policy
from tfdist.parameter_server.options.concise import Concise

Compression = Choice | Schedule | Policy
"""What ``compression=`` takes."""


@dataclass(frozen=True, repr=False)
class Gradients(Concise):
    """Workers push gradients, and get parameters back.

    Attributes:
        compression: a method, schedule or policy of `tfdist.compression`, for dense gradients. What an encoding lacks
            is added to the worker's next one. None for no compression.
        parameters: likewise, for the parameters that come back: the servers send what they differ by from those that
            the worker has, and keep these for each worker. Not with `DelayCompensated`.
        prefetch: 1 to compute the next step while the last one is on its way; its gradient is then of parameters that
            lack the worker's own last update, which counts as staleness. Not with `Synchronous`.
        sparse: "exact" for the optimizer's own mathematics; "lazy" to update, of a variable with a sparse gradient (an
            `Embedding`) and of its slots, only the rows that the gradient names. Workers get the rows that are newer,
            where other rows keep their values.
    """

    compression: Compression = None
    parameters: Compression = None
    prefetch: int = 0
    sparse: Literal["exact", "lazy"] = "exact"

    def __post_init__(self) -> None:
        policy_of(self.compression)
        policy_of(self.parameters)
        if self.prefetch not in (0, 1) or isinstance(self.prefetch, bool):
            raise ValueError(f"Gradients(prefetch=…) must be 0 or 1; got {self.prefetch!r}")
        if self.sparse not in ("exact", "lazy"):
            raise ValueError(f'Gradients(sparse=…) must be "exact" or "lazy"; got {self.sparse!r}')


@dataclass(frozen=True, repr=False)
class LocalSteps(Concise):
    """The worker's optimizer makes ``steps`` updates of the worker's own copy; then their sum is pushed.

    The servers add what comes, or its mean over workers where they average, and the worker goes on from what they have
    then. The optimizer's slots, its iterations and its learning rate are each worker's own.

    Attributes:
        steps: at least 1.
        compression: of the sum, as of `Gradients`.

    References:
        Dean et al., *Large scale distributed deep networks*, NeurIPS 2012 (Downpour SGD with n_push = n_fetch).
    """

    steps: int = 1
    compression: Compression = None

    def __post_init__(self) -> None:
        _check_steps("LocalSteps", self.steps)
        policy_of(self.compression)


@dataclass(frozen=True, repr=False)
class ElasticAveraging(Concise):
    """Each worker trains a copy of its own, which is tied to the servers' by a spring: asynchronous EASGD.

    Every ``steps`` steps a worker at x and the servers at c move towards each other by ``rate`` (x − c). The
    optimizer's slots, its iterations and its learning rate are each worker's own. `evaluate`, `predict` and `save`
    read c.

    Attributes:
        steps: between two moves, at least 1.
        rate: above 0 and at most 1; None for 0.9 divided by the number of workers.
        compression: of what the servers are moved by, as of `Gradients`.

    References:
        Zhang, Choromanska and LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015.
    """

    steps: int = 10
    rate: float | None = None
    compression: Compression = None

    def __post_init__(self) -> None:
        _check_steps("ElasticAveraging", self.steps)
        policy_of(self.compression)
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"ElasticAveraging(rate=…) must be above 0 and at most 1; got {self.rate!r}")


@dataclass(frozen=True)
class Hogwild:
    """Workers on the server's machine change its memory directly, in each step, without locks and without messages.

    The worker's optimizer makes its update of the worker's copy; what has changed is added to the server's memory, and
    what others have changed there is read. Where two workers write to an element at the same time, one of the two
    changes may be lost: rare where gradients are sparse, or the model is large. Of an embedding, only rows that a batch
    has, and those that others have changed, are touched, if the optimizer leaves the other rows alone (SGD without
    momentum, Adagrad, Adadelta, RMSprop without momentum). Slots, iterations and the learning rate are each worker's
    own. Workers on other machines push what their optimizers have changed in each step.

    References:
        Recht, Ré, Wright and Niu, *Hogwild!: a lock-free approach to parallelizing stochastic gradient descent*,
        NeurIPS 2011.
    """


def _check_steps(name: str, steps: object) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{name}(steps=…) must be a whole number of at least 1; got {steps!r}")


def policy_of(compression: Compression) -> Policy | None:
    """A choice of compression as a policy; None for none.

    Args:
        compression: as of `Gradients`.

    Raises:
        TypeError: it is something else.
    """
    return None if compression is None else as_policy(compression)
