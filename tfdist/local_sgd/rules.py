"""What a round makes of the weights of all processes, for one fragment of them.

At its beginning the processes have in common a centre c. At its end process r has weights x, and m is the mean over
all processes of x − c. A rule says what the centre is then, and what a process goes on with.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np

log = logging.getLogger("tfdist")

Arrays = Sequence[np.ndarray]
States = list[list[np.ndarray]]
"""Of several rules."""


class Rule(abc.ABC):
    """For the variables of one fragment. What a user makes is a pattern, of which each fragment gets one of its own."""

    @abc.abstractmethod
    def begun(self, processes: int, delay: int) -> Rule:
        """A rule like this one, for one fragment.

        Args:
            processes: how many there are.
            delay: for how many steps an exchange is under way.
        """

    @abc.abstractmethod
    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """The new centre, in arrays of its own.

        Args:
            before: c; only read.
            mean: m; only read.
        """

    @abc.abstractmethod
    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """What this process goes on with, in arrays of its own.

        Args:
            own: its weights; only read.
            before: c; only read.
            centre: the new one; only read.
        """

    def state(self) -> list[np.ndarray]:
        """What has to be the same on all processes, in arrays of their own."""
        return []

    def restore(self, state: Arrays, like: Arrays) -> None:
        """Takes over the state of another process, or of a file.

        Args:
            state: as `state` returned it there.
            like: values of the variables; only read.

        Raises:
            ValueError: it is the state of another rule, or of other variables.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state; got one of {len(state)} arrays")


class Averaging(Rule):
    """The centre is the mean, c + m.

    Args:
        mix: α, at least 0 and below 1. A process goes on with α x + (1 − α) c. By 0, the default without a delay, it
            begins each round with the centre; more than 0, by default 0.5 with a delay, keeps some of what it has
            learned while the mean was under way.

    Attributes:
        mix: as given.

    Raises:
        ValueError: α is out of its range.
    """

    def __init__(self, mix: float | None = None) -> None:
        if mix is not None and not (isinstance(mix, (int, float)) and 0 <= mix < 1):
            raise ValueError(f"{type(self).__name__}(mix=…) is at least 0 and below 1; got {mix!r}")
        self.mix = mix

    def __repr__(self) -> str:
        return f"Averaging(mix={self.mix})"

    def begun(self, processes: int, delay: int) -> Averaging:
        """See `Rule`."""
        return Averaging(self._mixed(delay))

    def _mixed(self, delay: int) -> float:
        return (0.5 if delay else 0.0) if self.mix is None else float(self.mix)

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """See `Rule`."""
        return [one + change for one, change in zip(before, mean, strict=True)]

    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """See `Rule`."""
        if not self.mix:
            return [one.copy() for one in centre]
        return [_between(x, c, self.mix) for x, c in zip(own, centre, strict=True)]


class Outer(Averaging):
    """An outer optimizer moves the centre, as if −m were a gradient: DiLoCo.

    Args:
        optimizer: a Keras optimizer, of which this takes a copy. Its learning rate may be a schedule, over rounds.
        mix: as of `Averaging`.

    Raises:
        TypeError: the optimizer is none.
        ValueError: as of `Averaging`.

    References:
        Douillard et al., *DiLoCo: distributed low-communication training of language models*, 2023; and *Streaming
        DiLoCo with overlapping communication*, 2025. Reddi et al., *Adaptive federated optimization*, ICLR 2021.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, mix: float | None = None) -> None:
        super().__init__(mix)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"Outer takes an optimizer of Keras 3, such as keras.optimizers.SGD(0.7); got {optimizer!r}"
            )
        self._optimizer = optimizer
        self._copy: keras.optimizers.Optimizer | None = None
        self._variables: list[keras.Variable] = []

    def __repr__(self) -> str:
        """The same on all processes where the optimizer is the same, whatever its name."""
        config = {name: value for name, value in self._optimizer.get_config().items() if name != "name"}
        return f"Outer({type(self._optimizer).__name__}({config}), mix={self.mix})"

    def begun(self, processes: int, delay: int) -> Outer:
        """See `Rule`."""
        return Outer(self._optimizer, self._mixed(delay))

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """See `Rule`."""
        with ThreadPoolExecutor(1) as thread:  # which is in no strategy's scope
            return thread.submit(self._moved, before, mean).result()

    def _moved(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        copy = self._copy or self._begin(before)
        for variable, one in zip(self._variables, before, strict=True):
            variable.assign(one)
        copy.apply([keras.ops.convert_to_tensor(-change) for change in mean], self._variables)
        return [np.array(variable.value.numpy()) for variable in self._variables]

    def _begin(self, like: Arrays) -> keras.optimizers.Optimizer:
        self._copy = type(self._optimizer).from_config(self._optimizer.get_config())
        self._variables = [keras.Variable(one, dtype=one.dtype.name) for one in like]
        self._copy.build(self._variables)
        return self._copy

    def state(self) -> list[np.ndarray]:
        """See `Rule`: the optimizer's variables, such as its momentum; nothing before the first round."""
        return [] if self._copy is None else [np.array(variable.value.numpy()) for variable in self._copy.variables]

    def restore(self, state: Arrays, like: Arrays) -> None:
        """See `Rule`."""

        def restore() -> None:
            variables = (self._copy or self._begin(like)).variables
            own = [np.array(variable.value.numpy()) for variable in variables]
            expected, found = [one.shape for one in own], [one.shape for one in state]
            if found != expected:
                raise ValueError(f"the outer optimizer has variables of the shapes {expected}; got {found}")
            for variable, value, one in zip(variables, state, own, strict=True):
                # Files keep the bytes of numbers that NumPy does not know, such as bfloat16.
                variable.assign(value.view(one.dtype) if value.dtype.kind == "V" else value)

        if state:
            with ThreadPoolExecutor(1) as thread:  # as in `centre`
                thread.submit(restore).result()
        else:
            self._copy = None


class Elastic(Rule):
    """Processes and the centre are tied by springs and pull each other: synchronous EASGD.

    The centre becomes c + β m, and a process goes on with x + β / P (c − x), P being the number of processes.

    Args:
        moving_rate: β, above 0 and at most 1; 0.9 in the paper.

    Raises:
        ValueError: β is out of its range.

    References:
        Zhang, Choromanska and LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015, equations 5 and 6.
    """

    def __init__(self, moving_rate: float = 0.9) -> None:
        if not (isinstance(moving_rate, (int, float)) and 0 < moving_rate <= 1):
            raise ValueError(f"Elastic(moving_rate=…) is above 0 and at most 1; got {moving_rate!r}")
        self._moving_rate = moving_rate
        self._pull = moving_rate

    def __repr__(self) -> str:
        return f"Elastic({self._moving_rate})"

    def begun(self, processes: int, delay: int) -> Elastic:
        """See `Rule`."""
        made = Elastic(self._moving_rate)
        made._pull = self._moving_rate / processes
        return made

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """See `Rule`."""
        return [one + _times(change, self._moving_rate) for one, change in zip(before, mean, strict=True)]

    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """See `Rule`."""
        return [pulled(x, c, self._pull) for x, c in zip(own, before, strict=True)]


def pulled(own: np.ndarray, centre: np.ndarray, pull: float) -> np.ndarray:
    """Where a process goes on that is tied to a centre by a spring, in elastic averaging.

    Args:
        own: the weights of the process, x; only read.
        centre: the weights of the centre, c; only read.
        pull: share of their distance by which the process moves towards the centre, from 0 to 1.
    """
    return _between(own, centre, 1 - pull)


def _between(one: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    """``share`` of one array, and the rest of another."""
    return other + _times(one - other, share)


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    return array * array.dtype.type(factor)


def restore(rules: Sequence[tuple[Rule, Arrays]], states: States) -> None:
    """Gives rules the states that a file has, if it has some; for states of other rules all begin anew, with a warning.

    Args:
        rules: each with the values that it is for.
        states: of each.
    """
    if not states:
        return
    try:
        for (rule, like), state in zip(rules, states, strict=True):
            rule.restore(state, like)
    except ValueError as error:
        for rule, like in rules:  # the first ones may have taken theirs
            rule.restore([], like)
        log.warning(
            "tfdist: the states of outer optimizers that were saved are not those of this model and strategy (%s); "
            "training goes on without them.",
            error,
        )
