"""Options for what a worker pushes: gradients for the servers' optimizer, or changes that its own optimizer made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfdist import whole_numbers
from tfdist.compression import differences
from tfdist.compression.policy import Choice, Policy, Schedule, as_policy
from tfdist.parameter_server.options.concise import Concise

Compression = Choice | Schedule | Policy
"""Values that ``compression=`` takes."""


@dataclass(frozen=True, repr=False)
class Gradients(Concise):
    """Workers push gradients, and get parameters back.

    Attributes:
        compression: a method, schedule or policy of `tfdist.compression`, for dense gradients. What compression loses
            is added to the worker's next gradient. None for no compression.
        parameters: a method, schedule or policy for the parameters that come back: the servers keep a copy of each
            worker's parameters, and send compressed differences. None for no compression. Not with `DelayCompensated`.
        prefetch: 1 to compute the next step while the last push is on its way. The next gradient is then computed at
            parameters without the worker's own last update, which counts as staleness. Not with `Synchronous`.
        sparse: "exact" for the optimizer's own mathematics; "lazy" to update only the rows that a sparse gradient (of
            an `Embedding`) names, and their slots. Where an update keeps the other rows, workers get only newer rows.
    """

    compression: Compression = None
    parameters: Compression = None
    prefetch: int = 0
    sparse: Literal["exact", "lazy"] = "exact"

    def __post_init__(self) -> None:
        policy_of(self.compression)
        policy_of(self.parameters)
        differences.check(self.parameters, "Gradients(parameters=…)")
        if self.prefetch not in (0, 1) or isinstance(self.prefetch, bool):
            raise ValueError(f"Gradients(prefetch=…) must be 0 or 1; got {self.prefetch!r}")
        if self.sparse not in ("exact", "lazy"):
            raise ValueError(f'Gradients(sparse=…) must be "exact" or "lazy"; got {self.sparse!r}')


@dataclass(frozen=True, repr=False)
class LocalSteps(Concise):
    """The worker's optimizer makes ``steps`` updates of the worker's own copy; then the worker pushes their sum.

    The servers add the sum, or the mean of the workers' sums where they average, and the worker continues from their
    new values. The optimizer's slots, its iterations and its learning rate are each worker's own.

    Attributes:
        steps: number of updates between two pushes, at least 1.
        compression: compression of the sum, as in `Gradients`.

    References:
        Dean et al., *Large scale distributed deep networks*, NeurIPS 2012 (Downpour SGD with n_push = n_fetch).
    """

    steps: int = 1
    compression: Compression = None

    def __post_init__(self) -> None:
        whole_numbers.check("LocalSteps(steps=…)", self.steps)
        policy_of(self.compression)


@dataclass(frozen=True, repr=False)
class ElasticAveraging(Concise):
    """Each worker trains a copy of its own, which is tied to the servers' values by a spring: asynchronous EASGD.

    Every ``steps`` steps a worker at x and the servers at c move towards each other by ``rate`` (x − c). The
    optimizer's slots, its iterations and its learning rate are each worker's own. `evaluate`, `predict` and `save`
    read c.

    Attributes:
        steps: number of steps between two moves, at least 1.
        rate: part of the distance for each move, above 0 and at most 1; None for 0.9 divided by the number of workers.
        compression: compression of what the servers are moved by, as in `Gradients`.

    References:
        Zhang, Choromanska and LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015.
    """

    steps: int = 10
    rate: float | None = None
    compression: Compression = None

    def __post_init__(self) -> None:
        whole_numbers.check("ElasticAveraging(steps=…)", self.steps)
        policy_of(self.compression)
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"ElasticAveraging(rate=…) must be above 0 and at most 1; got {self.rate!r}")


@dataclass(frozen=True)
class Hogwild:
    """Workers on the server's machine change its memory directly, in each step, without locks and without messages.

    The worker's optimizer updates the worker's copy. Its changes are added to the server's memory, and what others have
    changed there is read. Where two workers write to an element at the same time, one of the two changes may be lost;
    this is rare where gradients are sparse, or the model is large. Of an embedding, a step touches only the rows of its
    batch and those that others have changed, if the optimizer does not change other rows (SGD without momentum,
    Adagrad, Adadelta, RMSprop without momentum). Slots, iterations and the learning rate are each worker's own. Workers
    on other machines push what their optimizers have changed in each step.

    References:
        Recht, Ré, Wright and Niu, *Hogwild!: a lock-free approach to parallelizing stochastic gradient descent*,
        NeurIPS 2011.
    """


def policy_of(compression: Compression) -> Policy | None:
    """Returns a choice of compression as a policy; None for no compression.

    Args:
        compression: method, schedule or policy, as in `Gradients`.

    Raises:
        TypeError: ``compression`` is none of these.
    """
    return None if compression is None else as_policy(compression)
