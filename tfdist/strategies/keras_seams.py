"""Every adaptation of Keras that a strategy alone cannot make, and those of training steps.

Checked on Keras 3.10 and 3.15. Each seam replaces one function of Keras by one that asks whether an
`AllReduceStrategy` is at work, and otherwise does what Keras does. Each has a test of its own.

| seam | why |
|---|---|
| the loss is weighed by n_r/N in ``fit`` | Keras takes a mean of means; shares may be unequal |
| `LossScaleOptimizer.check_finite` | one rank's infinity must make all ranks skip the step |
| `_maybe_symbolic_build` | Keras would draw a batch and all-reduce it to learn its shapes |
| the losses of several outputs | Keras weighs them by the batch's static size, which is unknown here |
| state made outside of the scope | would differ between processes, silently |
| the optimizers' `ops.cond` | with several devices, what synchronizes may not stand in a replica's conditional |
| `SeedGenerator.next` | Dropout must differ between replicas |
| `predict`'s reduction | Keras gathers for its own multi-worker strategy only |
| shuffling | processes that shuffle differently train on some samples twice and on others never |
| callbacks | one process writes; all stop at the same epoch; local state is averaged |
| ``save``, ``load_weights`` | one process writes, whole files only; one reads for all |
| `predict_on_batch` | every process brings its own rows |
| `jit_compile` | XLA rejects host calls |
| the optimizers' reduction of gradients | says whose they are, for compression |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as trainer_module
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils

from tfdist.strategies import at_work, keras_callbacks, keras_data, keras_optimizers, keras_saving
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.extended import AllReduceExtended
from tfdist.strategies.sample_counts import batch_size

_installed = False


def install() -> None:
    """Puts the seams in place, once."""
    global _installed
    if _installed:
        return
    _installed = True
    trainer = trainer_module.TensorFlowTrainer
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
        _replace(trainer, name, _raising_ours)
    _replace(trainer, "fit", _with_our_callbacks)
    _replace(trainer, "evaluate", _with_averaged_state)
    for name in ("train_on_batch", "test_on_batch"):
        _replace(trainer, name, _with_global_logs)
    _replace(trainer, "predict_on_batch", _of_own_rows)
    _replace(trainer, "_make_function", _with_sample_counts)
    _replace(trainer, "make_predict_function", _without_xla)
    _replace(compile_utils.CompileLoss, "call", _with_trackers_weighed)
    _replace(loss_module, "scale_loss_for_distribution", _weighed)
    _replace(loss_module, "unscale_loss_for_distribution", _unweighed)
    _replace(trainer_module, "reduce_per_replica", _gathered)
    _replace(seed_generator.SeedGenerator, "next", _folded)
    keras_data.install(_replace)
    keras_optimizers.install(_replace)
    keras_saving.install(_replace)


def _replace(owner: Any, name: str, seam: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(seam(original)))


# fit, evaluate, predict as a whole.


def _raising_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """An error of tfdist that went through a graph comes back as TensorFlow's; raise the one that was meant."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self)
        try:
            return original(self, *args, **kwargs)
        except tf.errors.OpError as error:
            engine = extended.world.engine if extended else None
            if engine is not None and engine.failure is not None:
                raise engine.failure.with_traceback(None) from None
            raise error

    return method


def _with_our_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        extended = at_work.of_model(self)
        if extended is None:
            return original(self, *args, **kwargs)
        args, callbacks = _take_callbacks(args, kwargs)
        kwargs["callbacks"] = keras_callbacks.adapt(callbacks, extended)
        try:
            return original(self, *args, **kwargs)
        finally:
            keras_data.forget_the_order()

    return fit


_CALLBACKS_PLACE = 5  # fit(x, y, batch_size, epochs, verbose, callbacks, …)


def _take_callbacks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    if len(args) <= _CALLBACKS_PLACE:
        return args, kwargs.get("callbacks")
    rest = args[_CALLBACKS_PLACE + 1 :]
    names = ("validation_split", "validation_data", "shuffle", "class_weight", "sample_weight", "initial_epoch",
             "steps_per_epoch", "validation_steps", "validation_batch_size", "validation_freq")  # fmt: skip
    kwargs.update(zip(names, rest, strict=False))
    return args[:_CALLBACKS_PLACE], args[_CALLBACKS_PLACE]


def _with_averaged_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (extended := at_work.of_model(self)) is not None:
            keras_callbacks.average_local_state(self, extended)
        return original(self, *args, **kwargs)

    return evaluate


def _with_global_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    """`train_on_batch` and `test_on_batch` return the metrics over all processes, as after an epoch."""

    signature = inspect.signature(original)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if at_work.of_model(self) is None:
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        return_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        original(*call.args, **call.kwargs)
        logs = tree.map_structure(lambda value: np.asarray(value).tolist(), self.get_metrics_result())
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    return method


def _of_own_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """`predict_on_batch` is of the rows that this process brings, and of no others."""

    def predict_on_batch(self: Any, x: Any) -> Any:
        if at_work.of_model(self) is None:
            return original(self, x)
        outputs = self.predict_step((tree.map_structure(tf.convert_to_tensor, x),))
        return tree.map_structure(trainer_module.convert_to_np_if_not_ragged, outputs)

    return predict_on_batch


# A step.


def _with_sample_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    def _make_function(self: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
        extended = at_work.of_model(self)
        if extended is None:
            return original(self, step_function)
        counts = extended.sample_counts

        @functools.wraps(step_function)
        def counted_step(data: Any) -> Any:
            with counts.replica(private.local_replica_id(), batch_size(data)):
                return step_function(data)

        _check_scope(self)
        self.jit_compile = False
        function = original(self, counted_step)

        def counted(iterator: Any) -> Any:
            if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                return function(iterator)
            return function(_counting_own(iterator, extended))

        return counted

    return _make_function


def _check_scope(model: Any) -> None:
    """State that was made outside of the scope is this process's alone, and nothing would tell."""
    variables = (*model.variables, *model.metrics_variables)
    outside = [variable.path for variable in variables if not private.is_distributed_variable(variable.value)]
    if outside:
        raise ValueError(
            f"created outside of strategy.scope(): {', '.join(outside[:5])}{', …' if len(outside) > 5 else ''}. Make "
            "the model and the metrics that `compile` is given inside `with strategy.scope():`, or their values would "
            "differ between processes."
        )


def _with_trackers_weighed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The losses of a model's several outputs are averaged over samples, as the loss is.

    Keras weighs them by the batch's static size, which is unknown where batches are dealt out.
    """

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        extended = at_work.current()
        if extended is None or not extended.sample_counts.active:
            return original(self, y_true, y_pred, sample_weight)
        if not self.built:
            self.build(y_true, y_pred)
        samples = extended.sample_counts.own()
        for tracker in self.metrics:
            tracker.update_state = functools.partial(_update_weighed, type(tracker).update_state, tracker, samples)
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            for tracker in self.metrics:
                del tracker.update_state

    return call


def _update_weighed(update: Any, tracker: Any, samples: tf.Tensor, values: Any, sample_weight: Any = None) -> Any:
    return update(tracker, values, sample_weight=samples)


def _counting_own(batches: Any, extended: AllReduceExtended) -> Iterator[Any]:
    """Data that every process brings itself (`train_on_batch`): every local replica gets all of it."""
    for batch in batches:
        samples = batch_size(batch) * len(extended.worker_devices)
        extended.sample_counts.set_total(extended.bridge.all_reduce([samples])[0])
        yield batch


def _without_xla(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_predict_function(self: Any, force: bool = False) -> Any:
        if at_work.of_model(self) is not None:
            self.jit_compile = False
        return original(self, force=force)

    return make_predict_function


def _weighed(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(value: Any) -> Any:
        extended = at_work.current()
        if extended is not None and extended.sample_counts.active:
            return extended.sample_counts.weigh(tf.convert_to_tensor(value))
        return original(value)

    return scale_loss_for_distribution


def _unweighed(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_loss_for_distribution(value: Any) -> Any:
        extended = at_work.current()
        if extended is not None and extended.sample_counts.active:
            return extended.sample_counts.unweigh(tf.convert_to_tensor(value))
        return original(value)

    return unscale_loss_for_distribution


def _folded(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_seed(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = original(self, *args, **kwargs)
        replica = tf.distribute.get_replica_context()
        if at_work.current() is None or replica is None or not isinstance(seed, tf.Tensor):
            return seed
        own = tf.cast(replica.replica_id_in_sync_group, seed.dtype)
        folded = tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), tf.cast(own, tf.int64))
        return tf.cast(folded % (2**31 - 1), seed.dtype)

    return next_seed


def _gathered(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        extended = at_work.of_strategy(strategy)
        if extended is None or reduction != "concat":
            return original(values, strategy, reduction)
        exchange = extended.exchange

        def gather(value: Any) -> Any:
            parts = strategy.experimental_local_results(value)
            if not all(isinstance(part, tf.Tensor) for part in parts):
                raise TypeError(f"predict gathers dense outputs; got {type(parts[0]).__name__}. Return a dense tensor.")
            # A batch was dealt out round the processes, one device of each after the other.
            return tf.concat([exchange.all_gather(tf.stack([p]) if p.shape.rank == 0 else p) for p in parts], 0)

        return tree.map_structure(gather, values)

    return reduce_per_replica
