"""Averages gradients of each process's own data over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.engine import precision
from tfdist.engine.group import ProcessGroup
from tfdist.engine.sums import Sums
from tfdist.functional import Adasum
from tfdist.optimizers.local_clipping import LocalClipping
from tfdist.private.optimizers import key_of
from tfdist.strategies.keras.gradient_norms import GradientNorms
from tfdist.tensors import map_values


class GradientAverager:
    """Averages gradients over the processes of a group.

    Args:
        group: the processes.
        average: whether sums are divided by the number of processes.
        adaptive: whether gradients are combined by `tfdist.Adasum` instead.
        compression: how gradients are compressed; see `tfdist.AllReduceStrategy`.
        sparse_as_dense: whether sparse gradients are made dense before they are summed.
        scale_local: whether gradients of local variables are divided by the number of processes, unless others are
            summed.
        clipping: limits of this process's gradients before they are summed; None for no limits.
        is_differentiable: whether sums and means of dense gradients, without compression, can be differentiated.
        float32_sums: whether gradients of half precision are summed in float32.

    Attributes:
        group: as given.
        compressor: compresses this process's gradients; None for no compression.
        averages: whether gradients are averaged without compression and clipping.
        norms: measures the noise of gradients in steps that are traced or run eagerly while it is set; None measures
            nothing.
        samples: number of samples of a process in a step, for ``norms``.
    """

    def __init__(
        self,
        group: ProcessGroup,
        average: bool = True,
        adaptive: bool = False,
        compression: Choice | Schedule | Policy = None,
        sparse_as_dense: bool = False,
        scale_local: bool = True,
        clipping: LocalClipping | None = None,
        is_differentiable: bool = False,
        float32_sums: bool = False,
    ) -> None:
        if adaptive and compression is not None:
            raise ValueError("Adasum combines only uncompressed gradients: leave out compression=")
        self.group = group
        self._sums = Sums(group)
        self._size = group.size
        self._average = average and not adaptive
        self._adaptive = adaptive
        self._sparse_as_dense = sparse_as_dense
        self._scale_local = scale_local
        self._clipping = clipping or LocalClipping()
        self._is_differentiable = is_differentiable
        self._float32_sums = float32_sums
        self.compressor = None if compression is None else Compressor(compression, group.rank, group.size)
        self.averages = self._average and compression is None and self._clipping == LocalClipping()
        self.norms: GradientNorms | None = None
        self.samples = 1
        self._local: set[int] = set()
        self._kept: list[Any] = []

    def keep_local(self, variable: Any) -> None:
        """Excludes a variable from averaging: every process uses its own gradients.

        Args:
            variable: a Keras or TensorFlow variable.
        """
        self._local.add(_identity(variable))
        self._kept.append(variable)  # so that no other variable gets its identity

    def is_local(self, variable: Any) -> bool:
        """Returns whether every process uses its own gradients of a variable.

        Args:
            variable: a Keras or TensorFlow variable.
        """
        return _identity(variable) in self._local

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums or averages gradients over the processes.

        Args:
            gradients: dense or sparse gradients of this process's data; None for no gradient, on all processes alike.
            variables: variables that the gradients belong to.

        Returns:
            The sums or means, bitwise equal on all processes; for local variables each process's own gradients.
        """
        results = list(gradients)
        common: list[int] = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if tf.is_symbolic_tensor(gradient):
                gradient.set_shape(variable.shape)  # a tensor of unknown size would get a collective of its own
            if self.is_local(variable):
                results[place] = self._of_local(gradient)
            else:
                common.append(place)
        clipped = self._clipping.clipped([self._densified(results[place]) for place in common])
        of_common = [variables[place] for place in common]
        terms = precision.widened(clipped) if self._float32_sums else clipped
        totals = precision.narrowed(self._over_processes(terms, of_common), clipped)
        for place, total in zip(common, totals, strict=True):
            results[place] = total
        return results

    def combined(self, values: Sequence[tf.Tensor], combine: np.ufunc) -> list[tf.Tensor]:
        """Combines values other than gradients over all processes.

        Args:
            values: dense tensors.
            combine: a commutative and associative NumPy ufunc of two arguments.
        """
        return self._sums.bridge.all_reduce(values, combine=combine)

    def _densified(self, gradient: Any) -> Any:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if is_sparse and self._sparse_as_dense else gradient

    def _of_local(self, gradient: Any) -> Any:
        if not ((self._average or self._adaptive) and self._scale_local):
            return gradient
        return map_values(lambda tensor: tensor / tf.cast(self._size, tensor.dtype), gradient)

    def _over_processes(self, values: list[Any], variables: list[Any]) -> list[Any]:
        names = [_path(variable) for variable in variables]
        if self._adaptive and any(isinstance(value, tf.IndexedSlices) for value in values):
            raise TypeError(
                "Adasum combines only dense gradients, and an embedding has sparse ones: pass sparse_as_dense=True"
            )
        if self.norms is not None and values and self.averages:
            weight = tf.constant(1 / self._size, tf.float64)
            terms = [*values, self.norms.own(values, weight, is_weighed=False)]
            *means, norms = self._sums.all_reduce(terms, [*names, "norms of gradients"], mean=True, adaptive=False)
            self.norms.add(means, norms, self._size * self.samples)
            return means
        if self.compressor is None:
            if self._is_differentiable and not self._adaptive:
                return self._differentiable(values, names)
            return self._sums.all_reduce(values, names, mean=self._average, adaptive=self._adaptive)
        keys = [_key(variable) for variable in variables]
        shapes = zip(keys, names, variables, strict=True)
        self.compressor.register({key: (name, tuple(variable.shape)) for key, name, variable in shapes})
        compressed = [
            None if isinstance(value, tf.IndexedSlices) else self.compressor.tensor(key, value)
            for key, value in zip(keys, values, strict=True)
        ]
        weight = tf.constant(1 / self._size, tf.float64) if self._average else None
        return self._sums.all_reduce(values, names, compressed, weight=weight)

    def _differentiable(self, values: list[Any], names: list[str]) -> list[Any]:
        """Returns sums or means that can be differentiated, by the same reduction of gradients; sparse ones cannot."""
        dense = [place for place, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
        if not dense:
            return self._sums.all_reduce(values, names, mean=self._average, adaptive=False)
        results = list(values)

        @tf.custom_gradient
        def totals(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
            inputs = list(values)
            for place, value in zip(dense, given, strict=True):
                inputs[place] = value
            results[:] = self._sums.all_reduce(inputs, names, mean=self._average, adaptive=False)

            def gradient(*upstream: tf.Tensor) -> list[Any]:
                of_dense = [f"the gradient of {names[place]}" for place in dense]
                return self._differentiable([tf.convert_to_tensor(tensor) for tensor in upstream], of_dense)

            return [results[place] for place in dense], gradient

        for place, total in zip(dense, totals(*(values[place] for place in dense)), strict=True):
            results[place] = total
        return results


def by_op(op: str | None, average: bool) -> tuple[bool, bool]:
    """Returns whether gradients are averaged, and whether they are combined adaptively.

    Args:
        op: name of the reduction; None leaves it to ``average``.
        average: whether gradients are averaged; otherwise they are summed.

    Raises:
        ValueError: gradients have no such reduction.
    """
    if op not in (None, "mean", "sum", Adasum):
        raise ValueError(f"op must be 'mean', 'sum' or tfdist.Adasum; got {op!r}")
    return (average if op is None else op == "mean"), op == Adasum


def _identity(variable: Any) -> int:
    """Returns the same number for a Keras variable and the TensorFlow variable inside it."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)


def _key(variable: Any) -> str:
    """Returns the key by which an optimizer finds a variable; of a tensor, its identity."""
    return key_of(variable) if isinstance(variable, (keras.Variable, tf.Variable)) else str(_identity(variable))


def _path(variable: Any) -> str:
    """Returns the name of a variable for messages; tensors, which a tape may also differentiate by, have none."""
    if isinstance(variable, keras.Variable):
        return str(variable.path)
    return str(variable.name) if isinstance(variable, tf.Variable) else "a tensor"
