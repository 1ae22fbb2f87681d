"""Gradients of one process's own data, averaged over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compression.compressor import Compressor
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.engine.group import Group
from tfdist.engine.sums import Sums
from tfdist.optimizers.local_clipping import LocalClipping


class Gradients:
    """Averages gradients over the processes of a group.

    Args:
        group: the processes.
        average: whether sums are divided by the number of processes.
        compression: as of `tfdist.AllReduceStrategy`.
        sparse_as_dense: whether sparse gradients are made dense before they are summed.
        scale_local: whether gradients of local variables are divided by the number of processes, if others are.
        clipping: of this process's gradients, before they are summed.

    Attributes:
        group: as given.
        variables: those of the gradients that are about to be averaged.
    """

    def __init__(
        self,
        group: Group,
        average: bool = True,
        compression: Choice | Schedule | Policy = None,
        sparse_as_dense: bool = False,
        scale_local: bool = True,
        clipping: LocalClipping | None = None,
    ) -> None:
        self.group = group
        self._sums = Sums(group)
        self._size = group.size
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._scale_local = scale_local
        self._clipping = clipping or LocalClipping()
        self._compressor = None if compression is None else Compressor(compression, group.rank, group.size)
        self.variables: list[Any] = []
        self._local: set[int] = set()
        self._kept: list[Any] = []

    def keep_local(self, variable: Any) -> None:
        """Leaves the gradients of a variable out: every process uses its own.

        Args:
            variable: of Keras or TensorFlow.
        """
        self._local.add(_identity(variable))
        self._kept.append(variable)  # so that no other variable gets its identity

    def is_local(self, variable: Any) -> bool:
        """Whether every process uses its own gradients of a variable.

        Args:
            variable: of Keras or TensorFlow.
        """
        return _identity(variable) in self._local

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums or averages gradients over the processes.

        Args:
            gradients: of this process's data, dense or sparse; None for none, on all processes alike.
            variables: that they belong to.

        Returns:
            The sums or means, bitwise equal on all processes; those of local variables, as `keep_local` says.
        """
        found = list(gradients)
        common: list[int] = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if self.is_local(variable):
                found[place] = self._of_local(gradient)
            else:
                common.append(place)
        own = self._clipping.clipped([self._densified(found[place]) for place in common])
        of_common = [variables[place] for place in common]
        for place, total in zip(common, self._over_processes(own, of_common), strict=True):
            found[place] = total
        return found

    def combined(self, values: Sequence[tf.Tensor], combine: np.ufunc) -> list[tf.Tensor]:
        """Combines other values of all processes.

        Args:
            values: dense.
            combine: a commutative and associative NumPy ufunc of two arguments.
        """
        return self._sums.bridge.all_reduce(values, combine=combine)

    def _densified(self, gradient: Any) -> Any:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if is_sparse and self._sparse_as_dense else gradient

    def _of_local(self, gradient: Any) -> Any:
        if not (self._average and self._scale_local):
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._of_local(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(self._size, gradient.dtype)

    def _over_processes(self, values: list[Any], variables: list[Any]) -> list[Any]:
        names = [_path(variable) for variable in variables]
        if self._compressor is None:
            return self._sums.all_reduce(values, names, mean=self._average)
        keys = [str(_identity(variable)) for variable in variables]
        shapes = zip(keys, names, variables, strict=True)
        self._compressor.register({key: (name, tuple(variable.shape)) for key, name, variable in shapes})
        compressed = [
            None if isinstance(value, tf.IndexedSlices) else self._compressor.tensor(key, value)
            for key, value in zip(keys, values, strict=True)
        ]
        weight = tf.constant(1 / self._size, tf.float64) if self._average else None
        return self._sums.all_reduce(values, names, compressed, weight=weight)


def _identity(variable: Any) -> int:
    """The same for a variable of Keras and the one of TensorFlow within it."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)


def _path(variable: Any) -> str:
    """The name of a variable in messages; tensors, whose gradients a tape may be asked for, have none."""
    if isinstance(variable, keras.Variable):
        return str(variable.path)
    return str(variable.name) if isinstance(variable, tf.Variable) else "a tensor"
