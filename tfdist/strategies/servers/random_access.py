"""Random access to the data that `fit` is given, so that any worker can make any batch.

The batches are those that Keras would make: its own adapters check the arguments, turn class weights into sample
weights, and convert dtypes.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.dealing.plan import Plan
from tfdist.private import datasets as private_datasets
from tfdist.private import epochs
from tfdist.private.keras import array_slicing, data_adapter_utils, data_adapters, tree
from tfdist.strategies.servers.dealt_batches import Batches, components, pack_components

_NUMBERS = "biufc"
"""Kinds of dtypes whose arrays NumPy indexes. TensorFlow indexes all others."""


class Source(Batches):
    """Data that is read by index.

    The index of an item is its place in the data. Items are samples, or whole batches where a batch cannot be divided.

    Args:
        items: number of items in the data.
        items_per_batch: number of items in each batch but the last; 1 if items are batches.
        element_spec: the type of a batch, a structure of `tf.TypeSpec`.
        shuffle: what Keras would shuffle: all items, the samples inside each batch, or nothing.
    """

    def __init__(
        self, items: int, items_per_batch: int, element_spec: Any, shuffle: bool | Literal["batch"] = False
    ) -> None:
        super().__init__(element_spec, shuffle)
        self.items = items
        self.items_per_batch = items_per_batch

    @property
    def batches(self) -> int:
        """The number of batches."""
        return -(-self.items // self.items_per_batch)

    def plan(self, seed: int | None) -> Plan:
        """Returns how the items of an epoch are divided into batches."""
        return Plan(self.items, self.items_per_batch, seed, self.shuffle == "batch")

    def first(self) -> Any:
        """Returns the first batch."""
        return self.batch(np.arange(min(self.items, self.items_per_batch)))

    @property
    def part_specs(self) -> Sequence[tf.TensorSpec]:
        """The types of the indices and of `_arrays`."""
        rows = self.items_per_batch if self.items % self.items_per_batch == 0 else None
        return tf.TensorSpec([rows], tf.int64), *self._array_specs

    def parts(self, payload: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the indices, and the arrays that Python reads by them."""
        indices = np.asarray(payload, np.int64)
        return indices, *self._arrays(indices)

    def assembled(self, parts: Sequence[tf.Tensor]) -> Any:
        """Returns a batch made from the indices and arrays of `parts`."""
        return self._assembled(parts[0], parts[1:])

    def batch(self, indices: np.ndarray) -> Any:
        """Returns a batch, eagerly.

        Args:
            indices: indices of the batch's items, int64 ``(items,)``.

        Returns:
            A structure of tensors of the type `element_spec`.
        """
        indices = np.asarray(indices, np.int64)
        return self._assembled(tf.constant(indices), [tf.constant(array) for array in self._arrays(indices)])

    @property
    def _array_specs(self) -> Sequence[tf.TensorSpec]:
        """The types of `_arrays`."""
        return ()

    def _arrays(self, indices: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the parts of a batch that Python reads; they share no memory with the data."""
        return ()

    @abstractmethod
    def _assembled(self, indices: tf.Tensor, arrays: Sequence[tf.Tensor]) -> Any:
        """Returns a batch from the indices and what `_arrays` has read; in a graph, or eagerly."""


def source_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    shuffle: bool | Literal["batch"] = True,
    class_weight: dict[int, float] | None = None,
    steps_per_epoch: int | None = None,
) -> Source | str:
    """Returns the data that `fit` was given, for reading by index. Reads nothing from data that can be read only once.

    Args:
        x: inputs or a dataset, as `keras.Model.fit` takes them.
        y: targets, as `fit` takes them.
        sample_weight: weights of the samples, as `fit` takes them.
        batch_size: number of samples in a batch; None for Keras's default.
        shuffle: whether to shuffle all samples, or, for "batch", the samples inside each batch.
        class_weight: weights of the classes, by class.
        steps_per_epoch: number of batches in an epoch; without a batch size, that of arrays follows from it.

    Returns:
        The source; or the reason why there is none, a clause about the data for a message.

    Raises:
        ValueError: Keras does not take these arguments either.
    """
    is_array = array_slicing.can_slice_array
    if all(is_array(part) for part in tree.flatten((x, y, sample_weight))):
        adapter = _adapter(x, y, sample_weight, batch_size, shuffle, class_weight, steps_per_epoch)
        return _Arrays(epochs.arrays_of(adapter), adapter.batch_size, shuffle)
    if isinstance(x, tf.data.Dataset):
        adapter = _adapter(x, y, sample_weight, None, False, class_weight)
        return _of_dataset(adapter.get_tf_dataset())
    if isinstance(x, keras.utils.PyDataset):
        return _of_py_dataset(x, bool(shuffle), _adapter(x, y, sample_weight, None, False, class_weight))
    return f"data of type {type(x).__name__} can only be read in its order"


def _adapter(
    x: Any, y: Any, sample_weight: Any, batch_size: Any, shuffle: Any, class_weight: Any, steps: int | None = None
) -> Any:
    return data_adapters.get_data_adapter(
        x, y, sample_weight, batch_size, steps, shuffle=shuffle, class_weight=class_weight
    )


class _Arrays(Source):
    """Arrays, tensors and data frames, nested in any way.

    Args:
        inputs: structure of the arrays, as Keras has checked and packed it.
        batch_size: number of samples in a batch.
        shuffle: what Keras would shuffle: all samples, the samples inside each batch, or nothing.
    """

    def __init__(self, inputs: Any, batch_size: int, shuffle: bool | Literal["batch"]) -> None:
        self._structure = tree.lists_to_tuples(tree.map_structure(lambda part: 0, inputs))
        self._parts = [_by_index(part) for part in tree.flatten(inputs)]
        samples = next(int(part.shape[0]) for part in tree.flatten(inputs) if part is not None)
        rows = batch_size if samples % batch_size == 0 else None
        self._array_parts = [part for part in self._parts if isinstance(part, np.ndarray)]
        self._specs = [tf.TensorSpec([rows, *part.shape[1:]], part.dtype) for part in self._array_parts]
        first = self.batch(np.arange(min(samples, batch_size)))
        super().__init__(samples, batch_size, _spec_of_rows(first, rows), shuffle)

    @property
    def _array_specs(self) -> Sequence[tf.TensorSpec]:
        return self._specs

    def _arrays(self, indices: np.ndarray) -> Sequence[np.ndarray]:
        return [part.take(indices, axis=0) for part in self._array_parts]

    def _assembled(self, indices: tf.Tensor, arrays: Sequence[tf.Tensor]) -> Any:
        left = iter(arrays)
        leaves = [next(left) if isinstance(part, np.ndarray) else _rows(part, indices) for part in self._parts]
        return tree.pack_sequence_as(self._structure, leaves)


def _by_index(part: Any) -> Any:
    """Returns a leaf of the user's arrays, converted as Keras does, so that its rows can be taken by index."""
    part = array_slicing.convert_to_sliceable(part, target_backend="tensorflow")
    if isinstance(part, np.ndarray) and (part.dtype.kind not in _NUMBERS or part.dtype.isbuiltin != 1):
        return tf.convert_to_tensor(part)
    return part


def _rows(part: Any, indices: tf.Tensor) -> Any:
    if part is None:
        return None
    if isinstance(part, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(part, indices)
    return tf.gather(part, indices, axis=0)


def _spec_of_rows(batch: Any, rows: int | None) -> Any:
    """Returns the type of batches like this one, with the given number of rows."""

    def spec_of(part: Any) -> Any:
        if part is None:
            return private_datasets.NoneSpec()
        if isinstance(part, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, *part.shape[1:]], part.dtype, part.ragged_rank, part.row_splits.dtype)
        if isinstance(part, tf.SparseTensor):
            return tf.SparseTensorSpec([rows, *part.shape[1:]], part.dtype)
        return tf.TensorSpec([rows, *part.shape[1:]], part.dtype)

    return tree.map_structure(spec_of, batch)


class _PyDataset(Source):
    """A `keras.utils.PyDataset`, read batch by batch.

    Args:
        batches: number of batches.
        batch_at: function that returns a batch as Keras's adapter does.
        element_spec: type of the batches.
        shuffle: whether Keras would shuffle the batches.
    """

    def __init__(self, batches: int, batch_at: Callable[[int], Any], element_spec: Any, shuffle: bool) -> None:
        super().__init__(batches, 1, element_spec, shuffle)
        self._batch_at = batch_at
        self._leaves = tree.flatten(element_spec)

    @property
    def _array_specs(self) -> Sequence[tf.TensorSpec]:
        return [component for spec in self._leaves for component in components(spec)]

    def _arrays(self, indices: np.ndarray) -> Sequence[np.ndarray]:
        batch = tree.lists_to_tuples(self._batch_at(int(indices[0])))
        tree.assert_same_structure(batch, self.element_spec)
        arrays: list[np.ndarray] = []
        for part, spec in zip(tree.flatten(batch), self._leaves, strict=True):
            arrays += _arrays_of(part, spec)
        return arrays

    def _assembled(self, indices: tf.Tensor, arrays: Sequence[tf.Tensor]) -> Any:
        left = iter(arrays)
        leaves = [pack_components(spec, [next(left) for _ in components(spec)]) for spec in self._leaves]
        return tree.pack_sequence_as(self.element_spec, leaves)


def _of_py_dataset(data: keras.utils.PyDataset, shuffle: bool, adapter: Any) -> Source | str:
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(data), hook) is not getattr(keras.utils.PyDataset, hook):
            return f"{type(data).__name__}.{hook} may change its batches, and differently on each worker"
    if not data.num_batches:
        return f"{type(data).__name__} has {'no end' if data.num_batches is None else 'no batches'}"

    def batch_at(number: int) -> Any:
        return epochs.standardized(adapter, data[number])

    first = [
        batch_at(number) for number in range(min(data.num_batches, data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC))
    ]
    spec = tree.map_structure(
        lambda part: private_datasets.NoneSpec() if isinstance(part, tf.OptionalSpec) else part,
        tree.lists_to_tuples(data_adapter_utils.get_tensor_spec(first)),
    )
    return _PyDataset(data.num_batches, batch_at, spec, shuffle)


def _arrays_of(part: Any, spec: tf.TypeSpec) -> list[np.ndarray]:
    """Returns copies of the arrays of a part of a batch: a `PyDataset` may reuse the memory of its batches.

    Raises:
        ValueError: the part has another shape than in the first batches.
    """
    if isinstance(spec, private_datasets.NoneSpec):
        return []
    if isinstance(spec, tf.TensorSpec):
        array = np.array(part, spec.dtype.as_numpy_dtype)
        if not spec.shape.is_compatible_with(array.shape):
            raise ValueError(
                f"a batch of the PyDataset has an array of shape {array.shape}; its first batches have {spec.shape}"
            )
        return [array]
    if data_adapter_utils.is_scipy_sparse(part):
        part = data_adapter_utils.scipy_sparse_to_tf_sparse(part)
    return [np.array(component) for component in tf.nest.flatten(part, expand_composites=True)]


class _Dataset(Source):
    """A `tf.data.Dataset`, read batch by batch.

    Args:
        batches: a dataset of batches, with random access.
    """

    def __init__(self, batches: tf.data.Dataset) -> None:
        super().__init__(int(batches.cardinality()), 1, batches.element_spec)
        self._batches = batches

    def _assembled(self, indices: tf.Tensor, arrays: Sequence[tf.Tensor]) -> Any:
        return tf.data.experimental.at(self._batches, indices[0])


def _of_dataset(data: tf.data.Dataset) -> Source | str:
    count = int(data.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return "the dataset does not know how many batches it has"
    if count <= 0:
        return f"the dataset has {'no end' if count == tf.data.INFINITE_CARDINALITY else 'no batches'}"
    kinds = [type(part).__name__ for part in private_datasets.parts_of(data)]
    if any("Shuffle" in kind for kind in kinds):
        return "the dataset shuffles, in another order on each worker"
    if any("Concatenate" in kind for kind in kinds):
        return "tf.data has no safe random access to concatenated datasets"
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # a fused map and batch has no random access
    source = _Dataset(data.with_options(options))
    try:
        # TensorFlow prepares a dataset's functions at their first use, for the context of that use, and keeps them.
        # Prepared by an iterator, they would crash the process after the iterator has gone; an eager context stays.
        # Each batch uses all of them, except in concatenated datasets.
        source.batch(np.array([0]))
    except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError, tf.errors.OutOfRangeError) as error:
        named = re.search(r"dataset (?:of type )?(\w+?)(?:Op)?\b", error.message, re.IGNORECASE)
        return f"tf.data has no random access to {named[1] if named else 'this dataset'}"
    return source
