"""Models are built, with their metrics and optimizers, before their steps are traced, and without drawing a batch.

Keras traces a step twice if the first trace makes variables.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.private import datasets as private_datasets
from tfdist.private import models
from tfdist.private import tensorflow as private
from tfdist.private.epochs import spec_of
from tfdist.private.keras import tf_trainer, tree
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.data.row_checks import rows_of_model
from tfdist.strategies.data.shares import Share, as_share
from tfdist.strategies.keras import keras_xla
from tfdist.strategies.keras.keras_variables import check_scope


def install() -> None:
    """Installs the hooks."""
    keras_hooks.add(BuiltFromTheSpec)


def build_without_strategy(model: Any, iterator: Any, data_batch: Any) -> None:
    """Builds the optimizer and the metrics of a model that no strategy trains; Keras does so for strategies only.

    Leaves to Keras eager steps and those of users, data whose spec does not have their shapes, and errors.

    Args:
        model: a compiled Keras model.
        iterator: the epoch iterator of its data; None if ``data_batch`` is given.
        data_batch: a batch.
    """
    if model.run_eagerly or not model.built or _cannot_be_called(model):
        return
    if not keras_xla.is_of_keras(model, "train_step"):
        return
    batch = data_batch if iterator is None else _placeholder(model, iterator)
    if batch is not None:
        try:
            models.build_state(model, batch)
        except Exception:  # of the user's loss or metrics: Keras raises it where it traces the step
            pass


def _cannot_be_called(model: Any) -> bool:
    return type(model).call is keras.Model.call


class BuiltFromTheSpec(keras_hooks.ModelHooks[Ability]):
    """The hook that builds models without drawing a batch, where the data's spec contains the shapes."""

    def symbolic_build(self, call: TrainerCall) -> None:
        """Builds a model that has a `call` from a placeholder; with a custom `train_step` this may fail silently.

        Raises:
            ValueError: the model has state that was made outside the scope.
        """
        if isinstance(self.extended, DataParallel):
            check_scope(call.model)
        call.replace(lambda: self._build(call))

    def _build(self, call: TrainerCall) -> None:
        model, iterator = call.model, call.arguments["iterator"]
        if _cannot_be_called(model):
            return
        try:
            if iterator is not None:
                batch = _placeholder(model, iterator)
                if batch is None:
                    batch = self._first(model, iterator)
                call.arguments.update(iterator=None, data_batch=batch)
            call.inner()
        except (RuntimeError, ValueError):  # a custom step may call the model differently, or not at all
            if type(model).train_step is tf_trainer.TensorFlowTrainer.train_step:
                raise

    def _first(self, model: Any, iterator: Any) -> Any:
        """Returns the first batch of this process, without others, whose specs have no shapes.

        Without data, a placeholder whose unknown sizes are 1.
        """
        with self.extended.local_only():
            batch = next((next(step[-1], None) for step in iterator), None)  # Keras 3.10 has fewer parts
        return _placeholder(model, iterator, unknown=1) if batch is None else _local(batch)


def _placeholder(model: Any, iterator: Any, unknown: int | None = None) -> Any:
    """Returns a placeholder like an iterator's batches: Keras needs their shapes and dtypes. None without shapes.

    Sizes that batches do not have in common stay unknown, as in the graph of a step; for eager steps the result is then
    None.

    Args:
        model: a compiled Keras model.
        iterator: the epoch iterator of its data.
        unknown: the size of unknown dimensions; None if they stay unknown.
    """
    spec = spec_of(iterator)
    spec = spec.data if isinstance(spec, Share) else spec
    rows = rows_of_model(model) or 1
    batch = tree.map_structure(lambda part: _some_rows(part, rows, unknown), spec)
    is_known = all(part is not None and not (model.run_eagerly and None in part.shape) for part in tree.flatten(batch))
    return batch if is_known else None


def _some_rows(spec: Any, rows: int, unknown: int | None) -> keras.KerasTensor | None:
    """Returns placeholder rows of a dataset's type; None if the spec has no number of dimensions."""
    spec = private_datasets.local_spec(spec)
    if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) or spec.shape.rank is None:
        return None
    shape = [rows, *(unknown if size is None else size for size in spec.shape[1:])] if spec.shape.rank else []
    return keras.KerasTensor(shape, spec.dtype.name)


def _local(batch: Any) -> Any:
    """Returns the first local replica's part of a batch, with at least one row to build a model from."""
    batch = tree.map_structure(
        lambda part: part.values[0] if isinstance(part, private.DistributedValues) else part, batch
    )
    return as_share(batch).data
