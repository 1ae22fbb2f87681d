"""Rules that combine the weights of all processes at the end of a round, for one fragment of the weights.

At the beginning of a round the processes have a common centre c. At its end process r has weights x, and m is the mean
over all processes of x − c. A rule computes the new centre and the weights with which a process continues.
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
"""States of several rules, each a list of arrays."""


class Rule(abc.ABC):
    """A rule for the variables of one fragment. A user makes a template, of which each fragment gets a copy."""

    @abc.abstractmethod
    def for_fragment(self, processes: int, delay: int) -> Rule:
        """Returns a rule like this one for one fragment.

        Args:
            processes: number of processes.
            delay: number of steps for which an exchange is under way.
        """

    @abc.abstractmethod
    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """Returns the new centre, in arrays of its own.

        Args:
            before: the old centre c; only read.
            mean: the mean m; only read.
        """

    @abc.abstractmethod
    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """Returns the weights with which this process continues, in arrays of their own.

        Args:
            own: weights x of this process; only read.
            before: the old centre c; only read.
            centre: the new centre; only read.
        """

    def state(self) -> list[np.ndarray]:
        """Returns copies of the arrays that have to be the same on all processes; none by default."""
        return []

    def restore(self, state: Arrays, like: Arrays) -> None:
        """Takes over the state of another process, or from a file.

        Args:
            state: arrays that `state` returned there.
            like: values of the variables; only read.

        Raises:
            ValueError: the state belongs to another rule, or to other variables.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state; got a state of {len(state)} arrays")


class Averaging(Rule):
    """Averaging: the new centre is the mean of the weights, c + m.

    Args:
        mix: α, at least 0 and below 1. A process continues with α x + (1 − α) times the new centre. With 0, the default
            without a delay, it begins each round with the centre. With more than 0, by default 0.5 with a delay, it
            keeps some of what it has learned while the exchange was under way.

    Attributes:
        mix: α as given; None for the default.

    Raises:
        ValueError: α is out of its range.
    """

    def __init__(self, mix: float | None = None) -> None:
        if mix is not None and not (isinstance(mix, (int, float)) and 0 <= mix < 1):
            raise ValueError(f"{type(self).__name__}(mix=…) must be at least 0 and below 1; got {mix!r}")
        self.mix = mix

    def __repr__(self) -> str:
        return f"Averaging(mix={self.mix})"

    def for_fragment(self, processes: int, delay: int) -> Averaging:
        """Returns the rule with α resolved for the delay; see `Rule`."""
        return Averaging(self._mixed(delay))

    def _mixed(self, delay: int) -> float:
        return (0.5 if delay else 0.0) if self.mix is None else float(self.mix)

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """Returns c + m; see `Rule`."""
        return [value + change for value, change in zip(before, mean, strict=True)]

    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """Returns the weights mixed with the new centre; see `Rule`."""
        if not self.mix:
            return [value.copy() for value in centre]
        return [_between(x, c, self.mix) for x, c in zip(own, centre, strict=True)]


class Outer(Averaging):
    """DiLoCo: an outer optimizer updates the centre, with −m as the gradient.

    Args:
        optimizer: a Keras optimizer, of which the rule uses a copy. Its learning rate may be a schedule over rounds.
        mix: fraction α of its own weights that a process keeps, as in `Averaging`.

    Raises:
        TypeError: ``optimizer`` is not a Keras optimizer.
        ValueError: α is out of its range.

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
        """Returns the same text on all processes that have the same optimizer, whatever its name."""
        config = {name: value for name, value in self._optimizer.get_config().items() if name != "name"}
        return f"Outer({type(self._optimizer).__name__}({config}), mix={self.mix})"

    def for_fragment(self, processes: int, delay: int) -> Outer:
        """Returns a rule with a copy of the optimizer; see `Rule`."""
        return Outer(self._optimizer, self._mixed(delay))

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """Returns the centre after an update by the optimizer; see `Rule`."""
        with ThreadPoolExecutor(1) as thread:  # a new thread is in no strategy's scope
            return thread.submit(self._moved, before, mean).result()

    def _moved(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        copy = self._copy or self._begin(before)
        for variable, value in zip(self._variables, before, strict=True):
            variable.assign(value)
        copy.apply([keras.ops.convert_to_tensor(-change) for change in mean], self._variables)
        return [np.array(variable.value.numpy()) for variable in self._variables]

    def _begin(self, like: Arrays) -> keras.optimizers.Optimizer:
        self._copy = type(self._optimizer).from_config(self._optimizer.get_config())
        self._variables = [keras.Variable(value, dtype=value.dtype.name) for value in like]
        self._copy.build(self._variables)
        return self._copy

    def state(self) -> list[np.ndarray]:
        """Returns the optimizer's variables, such as its momentum; nothing before the first round."""
        return [] if self._copy is None else [np.array(variable.value.numpy()) for variable in self._copy.variables]

    def restore(self, state: Arrays, like: Arrays) -> None:
        """Restores the optimizer's variables, or resets the optimizer if the state is empty; see `Rule`."""

        def restore() -> None:
            variables = (self._copy or self._begin(like)).variables
            current = [np.array(variable.value.numpy()) for variable in variables]
            expected, shapes = [array.shape for array in current], [array.shape for array in state]
            if shapes != expected:
                raise ValueError(f"the outer optimizer has variables of the shapes {expected}; got {shapes}")
            for variable, value, array in zip(variables, state, current, strict=True):
                # Files store dtypes that NumPy does not know, such as bfloat16, as raw bytes.
                variable.assign(value.view(array.dtype) if value.dtype.kind == "V" else value)

        if state:
            with ThreadPoolExecutor(1) as thread:  # as in `centre`
                thread.submit(restore).result()
        else:
            self._copy = None


class Elastic(Rule):
    """Synchronous EASGD: processes and the centre pull each other as if tied by springs.

    The centre becomes c + β m. A process continues with x + β / P (c − x), where P is the number of processes.

    Args:
        moving_rate: β, above 0 and at most 1; 0.9 in the paper.

    Raises:
        ValueError: β is out of its range.

    References:
        Zhang, Choromanska and LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015, equations 5 and 6.
    """

    def __init__(self, moving_rate: float = 0.9) -> None:
        if not (isinstance(moving_rate, (int, float)) and 0 < moving_rate <= 1):
            raise ValueError(f"Elastic(moving_rate=…) must be above 0 and at most 1; got {moving_rate!r}")
        self._moving_rate = moving_rate
        self._pull = moving_rate

    def __repr__(self) -> str:
        return f"Elastic({self._moving_rate})"

    def for_fragment(self, processes: int, delay: int) -> Elastic:
        """Returns a rule for this number of processes; see `Rule`."""
        made = Elastic(self._moving_rate)
        made._pull = self._moving_rate / processes
        return made

    def centre(self, before: Arrays, mean: Arrays) -> list[np.ndarray]:
        """Returns c + β m; see `Rule`."""
        return [value + _times(change, self._moving_rate) for value, change in zip(before, mean, strict=True)]

    def own(self, own: Arrays, before: Arrays, centre: Arrays) -> list[np.ndarray]:
        """Returns x + β / P (c − x); see `Rule`."""
        return [pulled(x, c, self._pull) for x, c in zip(own, before, strict=True)]


def pulled(weights: np.ndarray, centre: np.ndarray, pull: float) -> np.ndarray:
    """Where a process goes on that is tied to a centre by a spring, in elastic averaging.

    Args:
        weights: the weights of the process, x; only read.
        centre: the weights of the centre, c; only read.
        pull: share of their distance by which the process moves towards the centre, from 0 to 1.
    """
    return _between(weights, centre, 1 - pull)


def _between(array: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    """Returns ``share`` of one array plus the rest of the other."""
    return other + _times(array - other, share)


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    return array * array.dtype.type(factor)


def restore(rules: Sequence[tuple[Rule, Arrays]], states: States) -> None:
    """Gives rules the states from a file. If the states belong to other rules, resets all rules with a warning.

    Without states, rules begin anew.

    Args:
        rules: rules, each with the values that it is for.
        states: state of each rule; empty if the file has none.
    """
    try:
        for (rule, like), state in zip(rules, states or [[]] * len(rules), strict=True):
            rule.restore(state, like)
    except ValueError as error:
        for rule, like in rules:  # some may already have taken over their states
            rule.restore([], like)
        log.warning(
            "tfdist: the saved states of outer optimizers do not fit this model and strategy (%s); training goes on "
            "without them.",
            error,
        )
