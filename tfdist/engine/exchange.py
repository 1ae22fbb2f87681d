"""Collectives on TensorFlow tensors other than all-reduce: one host call each, in graphs and eagerly."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather, all_gather_rows
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.broadcast import broadcast
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.collectives.schedule import partition
from tfdist.engine import operations
from tfdist.engine.call_sites import call_site
from tfdist.engine.group import ProcessGroup
from tfdist.engine.host_calls import host_call
from tfdist.engine.means import Mean
from tfdist.tensors import to_array, to_tensor

HostFunction = Callable[..., "Sequence[np.ndarray]"]
"""A function on the host that is called with the key and the operands as arrays."""


class Exchange:
    """Gathers, scatters, broadcasts and barriers over a group.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self._group.members[self._group.rank]

    @property
    def members(self) -> tuple[int, ...]:
        """The processes' ranks in the job."""
        return self._group.members

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Concatenates a tensor over all processes, in the order of the ranks.

        Args:
            tensor: dense tensor of at least one dimension; all dimensions but ``axis`` are the same on all processes.
            axis: the dimension to concatenate along.

        Returns:
            The concatenation, on every process.
        """
        tensor = tf.convert_to_tensor(tensor)
        _check_rank("all_gather", tensor)
        if not -tensor.shape.rank <= axis < tensor.shape.rank:
            raise ValueError(f"all_gather: axis must be one of the tensor's {tensor.shape.rank} dimensions; got {axis}")
        axis = axis % tensor.shape.rank
        if not axis:
            return self.gather_rows(tensor)
        order = [axis, *(other for other in range(tensor.shape.rank) if other != axis)]
        return tf.transpose(self.gather_rows(tf.transpose(tensor, order), axis), np.argsort(order))

    @tf.autograph.experimental.do_not_convert
    def gather_rows(self, rows: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Concatenates the rows of all processes, in the order of their ranks; in a graph or eagerly.

        Args:
            rows: dense tensor of at least one dimension.
            axis: the caller's dimension that is the first one of ``rows``, the same on all processes.
        """

        def gather(key: str, array: np.ndarray) -> list[np.ndarray]:
            if array.dtype == object:
                return [self._gather_strings(key, array)]
            return [self._group.run(key, operations.all_gather_rows(array))[0]]

        kind = f"gather along axis {axis}" if axis else "gather"
        (gathered,) = self._call(kind, gather, [rows], [(rows.dtype, [None, *rows.shape[1:]])])
        return gathered

    def _gather_strings(self, key: str, array: np.ndarray) -> np.ndarray:
        lengths, characters = _characters(array)
        lengths = self._group.run(f"{key}: lengths", all_gather_rows(lengths))[0]
        return _strings(lengths, self._group.run(f"{key}: characters", all_gather_rows(characters))[0])

    @tf.autograph.experimental.do_not_convert
    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the root's tensor, on every process.

        Args:
            tensor: tensor of the same shape and dtype on all processes.
            root: rank in the group whose tensor is broadcast.
        """
        tensor = tf.convert_to_tensor(tensor)

        def send(key: str, array: np.ndarray) -> list[np.ndarray]:
            return [self._broadcast(key, array, root, f"{array.dtype} {array.shape} from {root}")]

        kind = f"broadcast from place {root}"
        return self._call(kind, send, [tensor], [(tensor.dtype, tensor.shape)], alike=True)[0]

    def broadcast_once(self, tensor: tf.Tensor, key: str, signature: str) -> tf.Tensor:
        """Returns rank 0's tensor, on every process; eagerly only.

        Args:
            tensor: tensor of the same shape and dtype on all processes.
            key: name for this broadcast.
            signature: text that is compared over the processes before anything is sent.
        """
        return to_tensor(self._broadcast(key, to_array(tensor), 0, signature))

    def compare(self, key: str, facts: Mapping[str, str]) -> dict[str, list[str]]:
        """Compares values that must be the same on all processes, by hashes. Eagerly only.

        Only values that differ are sent.

        Args:
            key: name for this comparison, the same on all processes.
            facts: values by name; the names are the same on all processes.

        Returns:
            The values that differ, by name: a list of all processes' values, in the order of the ranks.
        """
        hashes = [hashlib.blake2b(value.encode(), digest_size=8).digest() for value in facts.values()]
        everyone = np.zeros((self._group.size, len(facts)), np.int64)
        everyone[self._group.rank] = np.frombuffer(b"".join(hashes), np.int64)
        self._group.run(key, all_gather(list(everyone)), ", ".join(facts))  # in one round: the numbers are known
        names = [name for name, column in zip(facts, everyone.T, strict=True) if (column != column[0]).any()]
        if not names:
            return {}
        rows = self._gather_strings(f"{key}: values", np.array([[facts[name].encode() for name in names]], object))
        return {name: [value.decode() for value in column] for name, column in zip(names, rows.T, strict=True)}

    @tf.autograph.experimental.do_not_convert
    def reduce_scatter(
        self,
        tensor: tf.Tensor,
        combine: np.ufunc = np.add,
        rows: tf.Tensor | None = None,
        verb: str | None = None,
        mean: bool = False,
    ) -> tf.Tensor:
        """Combines a tensor over all processes, and gives each process some of the result's rows.

        Args:
            tensor: tensor of at least one dimension, of the same shape and dtype on all processes.
            combine: a commutative and associative NumPy ufunc of two arguments.
            rows: the number of rows for this process; rows are assigned in the order of the ranks. By default all get
                the same number, and the first ranks one more if rows do not divide evenly.
            verb: the purpose in one word, the same on all processes; by default derived from ``combine``.
            mean: whether sums are divided by the number of processes; see `tfdist.engine.bridge.Bridge.all_reduce`.

        Returns:
            This process's rows.
        """
        tensor = tf.convert_to_tensor(tensor)
        _check_rank("reduce_scatter", tensor)

        def scatter(key: str, array: np.ndarray, own_rows: np.ndarray | None = None) -> list[np.ndarray]:
            if own_rows is None:
                shares = partition(len(array), self._group.size)
            else:
                counts, _ = self._group.run(f"{key}: rows", all_gather_rows(own_rows.reshape(1)))
                ends = np.cumsum(counts)
                shares = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

            def combined(key: str, vector: np.ndarray) -> np.ndarray:
                width = vector.size // max(1, len(array))
                buffer = self._group.take(vector.nbytes).view(vector.dtype)
                buffer[...] = vector
                parts = [buffer[share.start * width : share.stop * width] for share in shares]
                return np.array(self._group.run(key, reduce_scatter(parts, combine), f"{array.dtype} {array.shape}"))

            if mean:
                summing = Mean(array, self._group.size)
                result = summing.finished(
                    combined(key, summing.summed),
                    functools.partial(combined, f"{key}: once more, scaled"),
                    functools.partial(self._anywhere, f"{key}: overflow"),
                )
            else:
                result = combined(key, array.reshape(-1))
            own_share = shares[self._group.rank]
            return [result.reshape(own_share.stop - own_share.start, *array.shape[1:])]

        kind = f"reduce-scatter ({verb or ('mean' if mean else 'sum' if combine is np.add else combine.__name__)})"
        operands = [tensor] if rows is None else [tensor, tf.cast(rows, tf.int64)]
        return self._call(kind, scatter, operands, [(tensor.dtype, [None, *tensor.shape[1:]])], alike=rows is None)[0]

    @tf.autograph.experimental.do_not_convert
    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends some rows to every process, and receives some from every process.

        Args:
            tensor: dense tensor of at least one dimension; all dimensions but the first are the same on all processes.
            splits: the number of rows for each process, in the order of the ranks; they add up to all rows.

        Returns:
            The received rows, in the order of the ranks, and the number of rows from each rank (int64).
        """
        tensor = tf.convert_to_tensor(tensor)
        splits = tf.cast(splits, tf.int64)
        _check_rank("all_to_all", tensor)

        def exchange(key: str, array: np.ndarray, given_rows: np.ndarray) -> list[np.ndarray]:
            if given_rows.shape != (self._group.size,) or given_rows.sum() != len(array) or (given_rows < 0).any():
                raise ValueError(
                    f"splits must hold one number of rows for each of the {self._group.size} ranks, {len(array)} "
                    f"in total; got {given_rows.tolist()}"
                )
            taken_rows = np.zeros_like(given_rows)
            ranks = range(self._group.size)
            self._group.run(
                f"{key}: rows",
                all_to_all([given_rows[r : r + 1] for r in ranks], [taken_rows[r : r + 1] for r in ranks]),
            )
            result = np.empty((int(taken_rows.sum()), *array.shape[1:]), array.dtype)
            given = np.split(np.ascontiguousarray(array), np.cumsum(given_rows)[:-1])
            taken = np.split(result, np.cumsum(taken_rows)[:-1])
            self._group.run(key, all_to_all([rows.reshape(-1) for rows in given], [rows.reshape(-1) for rows in taken]))
            return [result, taken_rows]

        shapes = [(tensor.dtype, [None, *tensor.shape[1:]]), (tf.int64, splits.shape)]
        taken, taken_splits = self._call("all-to-all", exchange, [tensor, splits], shapes)
        return taken, taken_splits

    @tf.autograph.experimental.do_not_convert
    def barrier(self) -> None:
        """Waits until every process has called this."""

        def wait(key: str) -> list[np.ndarray]:
            self._group.run(key, operations.barrier())
            return [np.zeros((), np.int64)]

        self._call("barrier", wait, [], [(tf.int64, [])])

    def _anywhere(self, key: str, here: bool) -> bool:
        """Returns whether a condition is true on any process."""
        flag = np.array([here], np.uint8)
        self._group.run(key, ALGORITHMS["butterfly"](flag, np.maximum))
        return bool(flag[0])

    def _broadcast(self, key: str, array: np.ndarray, root: int, signature: str) -> np.ndarray:
        if array.dtype == object:
            return self._broadcast_strings(key, array, root, signature)
        value = np.array(array)
        self._group.run(key, broadcast(value.reshape(-1).view(np.uint8), root), signature)
        return value

    def _broadcast_strings(self, key: str, array: np.ndarray, root: int, signature: str) -> np.ndarray:
        lengths, characters = _characters(array)
        lengths = self._broadcast(key, lengths, root, signature)
        if self._group.rank != root:
            characters = np.empty(lengths.sum(), np.uint8)
        return _strings(lengths, self._broadcast(f"{key}: characters", characters, root, ""))

    def _call(
        self,
        kind: str,
        function: HostFunction,
        operands: Sequence[tf.Tensor],
        results: Sequence[tuple[tf.DType, Any]],
        alike: bool = False,
    ) -> list[tf.Tensor]:
        """Calls a host function now, or from the graph under construction.

        Args:
            kind: name of the collective, for its key.
            function: host function to call.
            operands: arguments of the function after the key.
            results: dtype and static shape of each result of the function.
            alike: whether the first operand has the same shape on all processes.
        """
        what = f" of {operands[0].dtype.name}" if operands else ""
        if tf.executing_eagerly():
            shapes = (tuple(operand.shape) for operand in operands[:1])
            what += "".join(f" {shape if alike else ('*', *shape[1:])}" for shape in shapes)
            key = f"eager {kind}{what}"
        else:
            key = call_site(f"{kind}{what}", self._group.members)
        specs = [tf.TensorSpec(shape, dtype) for dtype, shape in results]
        outputs: list[tf.Tensor] = host_call(functools.partial(function, key), operands, specs, name="tfdist_exchange")
        return outputs


def _characters(strings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the length of each string, and the bytes of all strings."""
    parts = strings.reshape(-1).tolist()
    lengths = np.array([len(part) for part in parts], np.int64).reshape(strings.shape)
    return lengths, np.frombuffer(b"".join(parts), np.uint8)


def _strings(lengths: np.ndarray, characters: np.ndarray) -> np.ndarray:
    """Returns the strings that `_characters` has taken apart."""
    text, ends = characters.tobytes(), np.cumsum(lengths.reshape(-1)).tolist()
    strings = np.empty(lengths.size, object)
    strings[:] = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return strings.reshape(lengths.shape)


def _check_rank(name: str, tensor: tf.Tensor) -> None:
    if tensor.shape.rank is None:
        raise ValueError(f"{name} must know how many dimensions the tensor has; call tf.ensure_shape on it first")
    if tensor.shape.rank == 0:
        raise ValueError(f"{name} needs a tensor of at least one dimension; got a scalar")
