"""A layer's rows in a table: looked up in its call, and updated where its optimizer is applied.

Keras's training loops know gradients of variables only. So a layer with rows has a trainable variable without elements,
its *anchor*. A lookup depends on it, and the gradient that it gets is `tf.IndexedSlices` whose indices are keys and
whose values are the gradients of their rows. It reaches the optimizer with those of all other variables: scaled
like them, summed over all uses, and only if they are applied.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engine.host_calls import host_call
from tfdist.parameter_server.tables.client import TableClient
from tfdist.private.optimizers import learning_rate


class EmbeddedRows:
    """Rows of a table, looked up and updated behind an anchor.

    Args:
        table: the table that has the rows.
        optimizer: the rows' own optimizer, as `keras.optimizers.serialize` describes it; None uses the optimizer that
            is applied to the anchor.
    """

    def __init__(self, table: TableClient, optimizer: dict[str, Any] | None) -> None:
        self.table = table
        self._dim = table.form.dim
        self._own = optimizer
        self._known: Any = lambda: None
        self._makes_rows = False

    def put_behind(self, anchor: Any) -> None:
        """Attaches these rows to a variable, where `rows_of` finds them."""
        anchor._tfdist_rows = self

    def lookup(self, anchor: Any, keys: tf.Tensor, create: Any, is_told: bool = True) -> tf.Tensor:
        """Returns the rows of keys; in the graph under construction, or eagerly.

        Args:
            anchor: the anchor of the rows, a Keras variable.
            keys: int64, any shape.
            create: whether this counts as a use of the keys, which makes rows; a boolean or a scalar tensor.
            is_told: whether ``create`` is known. If not, as in a model whose ``call`` has no argument ``training``, an
                update with the gradient counts as a use.

        Returns:
            A tensor of the keys' shape and ``dim``, whose gradient reaches the anchor.
        """

        def on_host(keys: np.ndarray, create: np.ndarray) -> np.ndarray:
            with tf.init_scope():  # a gradient tape must not see the variables of a table in this process
                return self.table.lookup(keys, bool(create))

        with tf.device("CPU:0"):
            distinct, places = tf.unique(tf.reshape(keys, [-1]))
            spec = tf.TensorSpec([None, self._dim], self.table.form.dtype)
            rows = host_call(on_host, [distinct, tf.convert_to_tensor(create)], spec, name="tfdist_lookup")

        @tf.custom_gradient
        def looked_up(anchor: tf.Tensor) -> tuple[tf.Tensor, Any]:
            embeddings = tf.reshape(tf.gather(rows, places), tf.concat([tf.shape(keys), [self._dim]], 0))
            embeddings.set_shape([*keys.shape, self._dim] if keys.shape.rank is not None else None)

            def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
                each = tf.reshape(upstream, [-1, self._dim])
                self._makes_rows = self._makes_rows or not is_told
                values = tf.math.unsorted_segment_sum(each, places, tf.size(distinct))
                return tf.IndexedSlices(values, distinct, tf.constant([0, self._dim], tf.int64))

            return embeddings, gradient

        return looked_up(tf.convert_to_tensor(anchor.value))

    def update(self, optimizer: Any, gradient: Any) -> None:
        """Updates rows; in the graph under construction, or eagerly.

        Args:
            optimizer: the Keras optimizer that is applied to the anchor.
            gradient: the anchor's gradient, whose indices are keys.

        Raises:
            TypeError: the gradient is not a `tf.IndexedSlices`.
            MessageRefusedError: the optimizer cannot be used for rows.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                "gradients of a DynamicEmbedding must reach the optimizer as they are, as tf.IndexedSlices of keys and "
                f"their rows' gradients; got {type(gradient).__name__}"
            )
        with tf.init_scope():
            if self._known() is not optimizer:
                self.table.set_optimizer(self._own or _description(optimizer))
                self._known = weakref.ref(optimizer)
        values = gradient.values
        if optimizer.loss_scale_factor is not None:
            values = values / optimizer.loss_scale_factor
        rate = learning_rate(optimizer)
        sends_rate = self._own is None and self.table.is_chief and isinstance(rate, keras.Variable)

        create, self._makes_rows = self._makes_rows, False  # for the step that is traced, or run eagerly

        def on_host(keys: np.ndarray, values: np.ndarray, rate: np.ndarray) -> None:
            with tf.init_scope():
                self.table.update(keys, values, float(rate) if sends_rate else None, create)

        with tf.device("CPU:0"):
            inputs = [gradient.indices, values, tf.convert_to_tensor(rate.value) if sends_rate else tf.constant(0.0)]
            host_call(on_host, inputs, [], name="tfdist_rows")

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys in ascending order, int64 [rows], and their values [rows, dim]."""
        return self.table.export()

    def assign(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Replaces all rows; see `TableClient.assign`."""
        self.table.assign(keys, values)


def rows_of(variable: Any) -> EmbeddedRows | None:
    """Returns the rows behind a variable; None if it is not an anchor."""
    rows: EmbeddedRows | None = getattr(variable, "_tfdist_rows", None)
    return rows


def _description(optimizer: Any) -> dict[str, Any]:
    """Returns the description of a Keras optimizer that updates rows with unscaled gradients.

    It makes no copy of the optimizer: a copy has variables, and a step that makes variables is traced twice.
    """
    described: dict[str, Any] = keras.optimizers.serialize(optimizer)
    described["config"]["loss_scale_factor"] = None
    return described
