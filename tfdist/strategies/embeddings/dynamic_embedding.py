"""`DynamicEmbedding`: an embedding for any int64 key."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import whole_numbers
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.tables.client import InProcess, TableClient, TableConnections, TableSpec
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability
from tfdist.strategies.embeddings import keras_embeddings
from tfdist.strategies.embeddings.embedded_rows import EmbeddedRows
from tfdist.strategies.keras import keras_seams


@dataclass(frozen=True)
class _Settings:
    """Settings of a layer, in an object of their own, so that Keras neither wraps nor saves its parts.

    Attributes:
        form: number of columns, initial values and policy of the table.
        optimizer: the rows' own optimizer, as `keras.optimizers.serialize` describes it; None for the model's.
        cache: which rows a worker keeps; None keeps none.
    """

    form: TableSpec
    optimizer: dict[str, Any] | None
    cache: CachePolicy | None


@keras.saving.register_keras_serializable(package="tfdist")
class DynamicEmbedding(keras.layers.Layer):
    """An embedding without a fixed size: each int64 key, for example a hash of an identifier, has a row.

    A row is made when its key is first seen in training. `evaluate` and `predict` make none: there, and before the
    policy admits a key, the layer returns the key's initial value, which depends on the seed and the key only.

    In a job with parameter servers the rows and their optimizer slots are on the servers, divided by a hash of the key;
    a worker holds the rows of its batch. Without parameter servers the rows are in this process. Updates touch the rows
    of the batch only: slots of other rows, such as Adam's, do not decay.

    Under `tfdist.ParameterServerStrategy` each gradient is an update, made when it arrives, in every mode of
    synchronization. Under `tfdist.AllReduceStrategy` the workers' gradients of a step are one update, equal to that of
    one process with the global batch.

    `model.save` and `save_weights` save keys and values, but not the rows' slots. Other methods that read weights
    (`get_weights`, ``restore_best_weights``) leave rows out.

    Args:
        dim: number of columns.
        initial: the initial values of rows.
        policy: which keys get a row, and when rows are evicted; ``max_rows`` is a limit of each server.
        optimizer: the optimizer of the rows; by default the model's, with its learning rate. It must treat each row on
            its own, and may not clip by norms, average or accumulate.
        cache: which frequent rows a worker keeps, to read them from the servers less often; by default none. Only under
            `tfdist.ParameterServerStrategy`, and in training: `evaluate` and `predict` read the newest rows.
        **options: further options of `keras.layers.Layer`.

    Raises:
        ValueError: ``dim`` is below 1; or, when it is built, there are several replicas and no parameter server.

    Attributes:
        dtype_of_keys: dtype of the input of a `keras.Sequential` that begins with this layer.
    """

    dtype_of_keys = "int64"

    def __init__(
        self,
        dim: int,
        initial: InitialRows | dict[str, Any] | None = None,
        policy: RowPolicy | dict[str, Any] | None = None,
        optimizer: Any = None,
        cache: CachePolicy | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        whole_numbers.check("dim", dim)
        keras_seams.install()
        keras_embeddings.install()
        initial = InitialRows(**initial) if isinstance(initial, dict) else initial or InitialRows()
        policy = RowPolicy(**policy) if isinstance(policy, dict) else policy or RowPolicy()
        described = None if optimizer is None else keras.optimizers.serialize(_optimizer(optimizer))
        cache = CachePolicy(**cache) if isinstance(cache, dict) else cache
        self._settings = _Settings(TableSpec(dim, initial, policy), described, cache)
        self._rows: EmbeddedRows | None = None
        self.supports_jit = False

    def build(self, input_shape: Any) -> None:
        """Makes the table, on the parameter servers of the job if it has some."""
        form = self._settings.form
        extended = current_strategy.current(Ability)
        table = None if extended is None else extended.table(self.name, form, self._settings.cache)
        if table is None:
            if tf.distribute.get_strategy().num_replicas_in_sync > 1:
                raise ValueError(
                    f"without parameter servers, the layer {self.name} can be trained by one replica only. Give the "
                    'job parameter servers (`tfdist run --ps 1`, or a job "ps" in TF_CONFIG), or use '
                    "keras.layers.Embedding with a fixed size."
                )
            table = TableClient(TableConnections([InProcess()]), self.name, form)
        self._rows = EmbeddedRows(table, self._settings.optimizer)
        self._anchor = self.add_weight(
            name="anchor", shape=(0, form.dim), initializer="zeros", dtype=form.dtype, autocast=False
        )
        self._rows.put_behind(self._anchor)

    def call(self, keys: Any, training: Any = None) -> Any:
        """Returns the rows of keys.

        Args:
            keys: integers of any shape.
            training: whether keys without a row get one.

        Returns:
            A tensor of the keys' shape and ``dim``.

        Raises:
            TypeError: the keys are not integers.
        """
        assert self._rows is not None
        keys = tf.convert_to_tensor(keys)
        if not keys.dtype.is_integer:
            raise TypeError(
                f"the layer {self.name} takes integers as keys; got {keys.dtype.name}. Give `keras.layers.Input` "
                'dtype="int64", and hash strings (`keras.layers.Hashing`).'
            )
        create = tf.cast(training or False, tf.bool) if self.trainable else tf.constant(False)
        sharing = current_strategy.sharing()
        if sharing is not None:  # a stand-in row does not count as a use of its keys
            create = tf.logical_and(create, tf.logical_not(sharing.shares.is_empty()))
        rows = self._rows.lookup(self._anchor, tf.cast(keys, tf.int64), create, is_told=training is not None)
        return tf.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns the keys' shape and ``dim``."""
        return (*input_shape, self._settings.form.dim)

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all rows of all servers.

        Returns:
            The keys in ascending order, int64 [rows], and their values, float32 [rows, dim].

        Raises:
            ValueError: the layer is not built.
        """
        if self._rows is None:
            raise ValueError(f"the layer {self.name} is not built: call it, or give the model an Input")
        return self._rows.export()

    def save_own_variables(self, store: Any) -> None:
        """Saves keys and values."""
        store["keys"], store["rows"] = self.export()

    def load_own_variables(self, store: Any) -> None:
        """Loads keys and values. Servers take the chief's, and initial ones only if no row was updated."""
        assert self._rows is not None
        self._rows.assign(np.asarray(store["keys"]), np.asarray(store["rows"]))

    def get_config(self) -> dict[str, Any]:
        """Returns the settings from which Keras makes the layer again."""
        form = self._settings.form
        config: dict[str, Any] = {"dim": form.dim, "initial": asdict(form.initial), "policy": asdict(form.policy)}
        config["cache"] = None if self._settings.cache is None else asdict(self._settings.cache)
        return {**super().get_config(), **config, "optimizer": self._settings.optimizer}


def _optimizer(given: Any) -> Any:
    """Returns an optimizer; copies a given description, into which Keras would write."""
    return keras.optimizers.get(deepcopy(given) if isinstance(given, dict) else given)
