"""What a worker pushes, other than gradients, when its own optimizer makes the updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalSteps:
    """The worker's optimizer makes ``steps`` updates of the worker's own copy; then their sum is pushed.

    The servers add what comes, or its mean over workers where they average, and the worker goes on from what they have
    then. The optimizer's slots, its iterations and its learning rate are each worker's own.

    Attributes:
        steps: at least 1.

    References:
        Dean et al., *Large scale distributed deep networks*, NeurIPS 2012 (Downpour SGD with n_push = n_fetch).
    """

    steps: int = 1

    def __post_init__(self) -> None:
        _check_steps("LocalSteps", self.steps)


@dataclass(frozen=True)
class ElasticAveraging:
    """Each worker trains a copy of its own, which is tied to the servers' by a spring: asynchronous EASGD.

    Every ``steps`` steps a worker at x and the servers at c move towards each other by ``rate`` (x − c). The
    optimizer's slots, its iterations and its learning rate are each worker's own. `evaluate`, `predict` and `save`
    read c.

    Attributes:
        steps: between two moves, at least 1.
        rate: above 0 and at most 1; None for 0.9 divided by the number of workers.

    References:
        Zhang, Choromanska and LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015.
    """

    steps: int = 10
    rate: float | None = None

    def __post_init__(self) -> None:
        _check_steps("ElasticAveraging", self.steps)
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
