"""The tensors of a host call, packed into few, because Python takes a long time for each tensor of a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.comm.buffers import BufferPool
from tfdist.engine import buckets
from tfdist.engine.posting import concatenated, split


class PackedTensors:
    """Tensors of fixed shapes, of which those in one bucket of `tfdist.engine.buckets` form a vector.

    Args:
        tensors: the tensors, or others of the same dtypes and shapes.

    Attributes:
        specs: dtype and shape of each packed tensor.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
        packed = buckets.plan(sizes, [tensor.dtype for tensor in tensors])
        places = list(itertools.chain(*(bucket.members for bucket in packed)))
        self._members = [bucket.members for bucket in packed]
        self._shapes = [[tuple(tensors[place].shape) for place in members] for members in self._members]
        self.specs = [
            tf.TensorSpec(shapes[0] if len(shapes) == 1 else [sum(map(math.prod, shapes))], bucket.kind)
            for shapes, bucket in zip(self._shapes, packed, strict=True)
        ]
        self._order: list[int] = np.argsort(places).tolist()

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Packs tensors, in a graph or eagerly; one that is alone is not copied.

        Args:
            tensors: tensors of the given dtypes and shapes.
        """
        return [concatenated([tensors[place] for place in members]) for members in self._members]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors that are packed, in a graph or eagerly.

        Args:
            packed: tensors that `pack` or `pack_arrays` returned.
        """
        shapes = [list(map(tf.TensorShape, some)) for some in self._shapes]
        return self._ordered([split(whole, some) for whole, some in zip(packed, shapes, strict=True)])

    def pack_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Packs arrays on the host, in memory of their own.

        Args:
            arrays: arrays of the given dtypes and shapes.
        """
        return [_in_own_memory([arrays[place] for place in members]) for members in self._members]

    def arrays(self, packed: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns views of the tensors that are packed, on the host.

        Args:
            packed: arrays of the tensors that `pack` returned.
        """
        parts = []
        for whole, shapes in zip(packed, self._shapes, strict=True):
            vector, ends = whole.reshape(-1), itertools.accumulate(map(math.prod, shapes), initial=0)
            cuts = itertools.starmap(slice, itertools.pairwise(ends))
            parts.append([vector[cut].reshape(shape) for cut, shape in zip(cuts, shapes, strict=True)])
        return self._ordered(parts)

    def _ordered(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the parts of all packed tensors in the order of the tensors that were given."""
        found = list(itertools.chain(*parts))
        return [found[place] for place in self._order]


def _in_own_memory(arrays: Sequence[np.ndarray]) -> np.ndarray:
    memory = _pool.take(sum(array.nbytes for array in arrays)).view(arrays[0].dtype)
    whole = np.concatenate([array.reshape(-1) for array in arrays], out=memory)
    return whole.reshape(arrays[0].shape) if len(arrays) == 1 else whole


_pool = BufferPool()
