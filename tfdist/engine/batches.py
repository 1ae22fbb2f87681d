"""Collectives of a batch whose rows are divided among processes, in parts of any sizes; in graphs and eagerly.

Each is one host call. A part has its rows along the first axis, and features along the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.all_gather import all_gather, all_gather_rows
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.engine import operations
from tfdist.engine.exchange import Exchange, HostFunction


class BatchExchange(Exchange):
    """Gathers a batch, cuts it by features, and gives each process its rows again, over a group.

    Counts are the number of rows of each process, an int64 vector. The methods that begin with rows return them; where
    they are given, as in a backward pass, they are not exchanged again.
    """

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._group.size

    @tf.autograph.experimental.do_not_convert
    def gathered(self, rows: tf.Tensor, counts: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of all processes, in the order of the ranks, and their counts.

        Args:
            rows: this process's rows; all axes but the first are as long on all processes.
            counts: rows of each process, if they are known.
        """

        def gather(key: str, array: np.ndarray, known: np.ndarray | None = None) -> list[np.ndarray]:
            if known is None:
                return list(self._group.run(key, operations.all_gather_rows(array)))
            result = np.empty((int(known.sum()), *array.shape[1:]), array.dtype)
            blocks = np.split(result, np.cumsum(known)[:-1])
            blocks[self._group.rank][...] = array
            self._group.run(key, all_gather([block.reshape(-1) for block in blocks]))
            return [result, known]

        return self._exchanged("gather of a batch", gather, rows, counts, rows.shape[1:])

    @tf.autograph.experimental.do_not_convert
    def scattered_sum(self, terms: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns this process's rows of the sum of all processes' terms.

        Args:
            terms: terms for all rows.
            counts: rows of each process.
        """

        def scatter(key: str, array: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
            self._check(array, known)
            vector = np.ascontiguousarray(array).reshape(-1)
            buffer = self._group.take(vector.nbytes).view(vector.dtype)
            ends = np.cumsum(known)[:-1] * (vector.size // max(1, len(array)))
            self._group.run(key, reduce_scatter(np.split(buffer, ends), inputs=np.split(vector, ends)))
            own = np.split(buffer, ends)[self._group.rank]
            return [np.array(own).reshape(-1, *array.shape[1:]), known]

        return self._exchanged("sum of a batch", scatter, terms, counts, terms.shape[1:])[0]

    @tf.autograph.experimental.do_not_convert
    def to_features(self, rows: tf.Tensor, counts: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this process's part of the features of all rows, and the counts.

        Args:
            rows: this process's rows with all features, which divide evenly.
            counts: rows of each process, if they are known.
        """
        processes = self._group.size

        def exchange(key: str, array: np.ndarray, known: np.ndarray | None = None) -> list[np.ndarray]:
            if known is None:
                own = np.array([[len(array)]], np.int64)
                known = self._group.run(f"{key}: rows", all_gather_rows(own))[0].reshape(-1)
            given = [np.ascontiguousarray(part).reshape(-1) for part in np.split(array, processes, -1)]
            result = np.empty((int(known.sum()), *array.shape[1:-1], array.shape[-1] // processes), array.dtype)
            taken = [block.reshape(-1) for block in np.split(result, np.cumsum(known)[:-1])]
            self._group.run(key, all_to_all(given, taken))
            return [result, known]

        shape = [*rows.shape[1:-1], rows.shape[-1] // processes]
        return self._exchanged("exchange of a batch for features", exchange, rows, counts, shape)

    @tf.autograph.experimental.do_not_convert
    def to_rows(self, features: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns this process's rows with the features of all processes, in the order of the ranks.

        Args:
            features: this process's features of all rows.
            counts: rows of each process.
        """
        processes = self._group.size

        def exchange(key: str, array: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
            self._check(array, known)
            array = np.ascontiguousarray(array)
            given = [block.reshape(-1) for block in np.split(array, np.cumsum(known)[:-1])]
            shape = (int(known[self._group.rank]), *array.shape[1:])
            taken = [np.empty(shape, array.dtype) for _ in range(processes)]
            self._group.run(key, all_to_all(given, [part.reshape(-1) for part in taken]))
            return [np.concatenate(taken, -1), known]

        shape = [*features.shape[1:-1], features.shape[-1] * processes]
        return self._exchanged("exchange of features for a batch", exchange, features, counts, shape)[0]

    def _exchanged(
        self, kind: str, function: HostFunction, tensor: tf.Tensor, counts: tf.Tensor | None, shape: Iterable[Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        operands = [tensor] if counts is None else [tensor, counts]
        results = [(tensor.dtype, [None, *shape]), (tf.int64, [self._group.size])]
        result, counts = self._call(kind, function, operands, results)
        return result, counts

    def _check(self, array: np.ndarray, counts: np.ndarray) -> None:
        if len(array) != counts.sum():
            raise ValueError(
                f"a batch of split features must have the rows of all processes, {counts.tolist()}; got {len(array)}. "
                "Give it to one layer that takes split features, with the rows in their order."
            )
