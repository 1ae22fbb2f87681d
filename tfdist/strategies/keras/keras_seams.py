"""Installs the patches of Keras ("seams") that strategies need and `tf.distribute` cannot provide.

If one feature changes a function of Keras, it wraps the function; if several do, they use hooks (`tfdist.seams.hooks`).
Most are for strategies with an ability (`tfdist.strategies.keras_hooks`, `tfdist.strategies.abilities`). Each seam has
its own test. The seams are installed when the first strategy or `DynamicEmbedding` is made: importing tfdist changes
nothing.

| seam | why |
|---|---|
| losses are a share's own in ``fit``, gradients are weighted | Keras takes a mean of means; shares may be unequal |
| gradients are summed before they are clipped | Keras clips on each replica |
| noise is added after the sum and before clipping | `tfdist.optimizers.GradientNoise` needs it, and installs it, too |
| `merge_call` | replicas of several devices call one model, which would mix the losses that its layers add |
| `_compute_moments_sync` | Keras reduces three sums one by one |
| `BatchNormalization._moments` | Keras does not synchronize masked samples |
| gradients through collectives of a step | come from other replicas' losses, which have other weights |
| steps work on shares, with a stand-in row in empty ones | kernels return garbage or crash without rows |
| logs of steps, and metrics' results | would be this process's own, and callbacks would decide differently |
| assignments in a step | go to the replica's own copy, and are merged by samples after the step |
| `LossScaleOptimizer.check_finite` | one rank's infinity must make all ranks skip the step |
| `_maybe_symbolic_build` | Keras would draw a batch, and drop it, to learn its shapes; it would require a `call` |
| an error for state made outside the scope | such state would silently differ between processes |
| the optimizers' `ops.cond` | with several devices, collectives may not run in one replica's conditional |
| `SeedGenerator.next` | Dropout must differ between replicas |
| `predict`'s reduction | Keras gathers only for its own multi-worker strategy |
| shuffling | processes that shuffle differently train on some samples twice and on others never |
| ``fit``, `evaluate`, `predict` | processes that are given different data would wait for each other |
| `evaluate` | must evaluate one model: weights are compared |
| callbacks | one process writes; all stop at the same epoch; weights are compared |
| ``save``, ``load_weights`` | one process writes, atomically; one reads for all |
| `predict_on_batch` | every process passes its own rows |
| `apply`, `evaluate`, `predict`, saving on parameter servers | servers hold optimizers' state and the newest values |
| `compile`, ``fit``, ``train_on_batch`` on parameter servers | name the state that was made outside the scope |
| `apply` of gradients of a `DynamicEmbedding` | its rows are in tables, not in variables |
| `Sequential.build` | an integer key would become a float where an `Input` is missing |
| ``fit`` on shared data, its iterators and `_maybe_symbolic_build` | batches are dealt out to workers |
| `apply`, `evaluate`, an epoch's logs in rounds | weights are exchanged after some steps, and are then equal |
| `apply`, `evaluate`, an epoch's end with late gradients | an update uses the gradients of the step before |
| `compile` | runs in the scope that the model was made in |
| steps with `jit_compile` | XLA rejects host calls: only the code between them is compiled |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.private.keras import seed_generator, tf_trainer, tree
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import current_strategy, keras_hooks, keras_unsynchronized
from tfdist.strategies.abilities import Ability, DataParallel
from tfdist.strategies.data import tensorflow_iterators
from tfdist.strategies.keras import (
    collective_gradients,
    keras_accumulation,
    keras_agreement,
    keras_assignments,
    keras_backup,
    keras_building,
    keras_callbacks,
    keras_comparison,
    keras_data,
    keras_epochs,
    keras_losses,
    keras_metrics,
    keras_noise,
    keras_optimizers,
    keras_saving,
    keras_scope,
    keras_step_calls,
    keras_steps,
    keras_variables,
    keras_xla,
    synchronized_moments,
)


def install_for(strategy: tf.distribute.Strategy) -> None:
    """Installs the seams; from then on `fit` warns about models that are made outside of a strategy's scope.

    Args:
        strategy: the strategy that is being made.
    """
    keras_unsynchronized.warn_outside_of(strategy)
    install()


def is_installed() -> bool:
    """Returns whether the seams are installed, because a strategy of tfdist has been made."""
    return install.is_done


@Once
def install() -> None:
    """Installs the seams that all strategies need, once. Further ones are installed by some strategies' `extended`."""
    tensorflow_iterators.install()
    keras_hooks.add(CommonHooks, WriterProgress, InOrder)
    keras_accumulation.install()
    keras_callbacks.install()
    keras_epochs.install()
    keras_backup.install()
    keras_comparison.install()
    replace(seed_generator.SeedGenerator, "next", _folded)
    collective_gradients.install()
    synchronized_moments.install()
    keras_steps.install()
    keras_losses.install()
    keras_metrics.install()
    keras_assignments.install()
    keras_variables.install()
    keras_building.install()
    keras_data.install()
    keras_noise.install()
    keras_optimizers.install()
    keras_saving.install()
    keras_scope.install()
    keras_xla.install()
    keras_step_calls.install()
    keras_agreement.install()


class CommonHooks(keras_hooks.ModelHooks[Ability]):
    """Hooks for the models of all strategies: the scope of `compile`, and the errors of graphs."""

    def compile(self, call: TrainerCall) -> contextlib.AbstractContextManager[Any]:
        """Compiles in the scope that the model was made in."""
        scope: contextlib.AbstractContextManager[Any] = call.model.distribute_strategy.scope()
        return scope

    def error(self, error: Exception) -> Exception | None:
        """Returns the original of an error of tfdist that a graph has wrapped in one of TensorFlow."""
        cause = self.extended.cause_of(error) if isinstance(error, tf.errors.OpError) else None
        return cause.with_traceback(None) if isinstance(cause, Exception) else None


class WriterProgress(keras_hooks.ModelHooks[Ability]):
    """Hooks by which only the writer shows progress, unless ``verbose`` is set."""

    def fit(self, call: TrainerCall) -> None:
        """Turns off the progress bar of all processes but the writer."""
        if not self.extended.is_writer and call.arguments["verbose"] == "auto":
            call.arguments["verbose"] = 0

    evaluate = predict = fit


class InOrder(keras_hooks.ModelHooks[DataParallel]):
    """Hooks that keep predictions in the order of the input."""

    ability = DataParallel

    def predict(self, call: TrainerCall) -> contextlib.AbstractContextManager[None]:
        """Has all processes read the same batches."""
        return self.extended.reading_in_order()

    def predict_on_batch(self, call: TrainerCall) -> None:
        """Predicts only the rows that this process passes."""
        call.replace(lambda: _predicted(call.model, call.arguments["x"]))


def _predicted(model: Any, x: Any) -> Any:
    outputs = model.predict_step((tree.map_structure(tf.convert_to_tensor, x),))
    return tree.map_structure(tf_trainer.convert_to_np_if_not_ragged, outputs)


def _folded(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_seed(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = original(self, *args, **kwargs)
        replica = tf.distribute.get_replica_context()
        extended = current_strategy.current(DataParallel)
        if extended is None or replica is None or not isinstance(seed, tf.Tensor):
            return seed
        if not extended.has_several_replicas and not extended.reader:
            return seed  # as without a strategy
        replica_number = tf.cast(replica.replica_id_in_sync_group, seed.dtype)
        replica_number += extended.reader * extended._num_replicas_in_sync
        folded = tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), tf.cast(replica_number, tf.int64))
        return tf.cast(folded % (2**31 - 1), seed.dtype)

    return next_seed
