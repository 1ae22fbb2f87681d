"""A gradient tape whose gradients are averaged over processes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import other_names
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.initialization import engine_group
from tfdist.optimizers.gradients import GradientAverager, by_op
from tfdist.optimizers.local_clipping import LocalClipping
from tfdist.runtime.groups import Group


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over processes, each of which has its own data.

    All other methods are those of the tape, which may have recorded already::

        with tf.GradientTape() as tape:
            loss = …
        tape = tfdist.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    Call `tfdist.init` first, and start with equal weights (`tfdist.broadcast_variables`). All processes of the group
    ask for the same gradients, in the same order. The arguments are described in `tfdist.DistributedOptimizer`.

    Args:
        tape: a gradient tape, new or after recording.
        compression: how gradients are compressed.
        algorithm: the all-reduce algorithm; by default that of `tfdist.init`.
        average: whether gradients are averaged; otherwise they are summed.
        op: "mean" or "sum", in place of ``average``; or `tfdist.Adasum`.
        sparse_as_dense: whether sparse gradients are made dense before they are averaged.
        group: the processes that take part; all by default.
        scale_local_gradients: whether averaging also divides gradients of local variables by the number of processes.
        local_clip_norm: largest norm of each gradient of this process's data, before averaging.
        local_clip_global_norm: largest norm of all gradients of this process's data together.
        local_clip_value: largest absolute value of an element of the gradients of this process's data.

    Raises:
        RuntimeError: `tfdist.init` has not been called.
        TypeError: ``tape`` is not a `tf.GradientTape`.
    """

    @other_names.hint_unknown_arguments(other_names.HOROVOD_ARGUMENTS)
    def __init__(
        self,
        tape: tf.GradientTape,
        compression: Choice | Schedule | Policy = None,
        algorithm: str | None = None,
        average: bool = True,
        op: str | None = None,
        sparse_as_dense: bool = False,
        group: Group | None = None,
        scale_local_gradients: bool = True,
        local_clip_norm: float | None = None,
        local_clip_global_norm: float | None = None,
        local_clip_value: float | None = None,
    ) -> None:
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(f"DistributedGradientTape takes a tf.GradientTape; got {tape!r}")
        self._tape = tape
        self._gradients = GradientAverager(
            engine_group(group, algorithm),
            *by_op(op, average),
            compression,
            sparse_as_dense,
            scale_local_gradients,
            LocalClipping(local_clip_norm, local_clip_global_norm, local_clip_value),
            is_differentiable=True,
        )

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: Any) -> None:
        """Excludes a variable from averaging: every process gets its own gradients.

        Args:
            source: a Keras or TensorFlow variable.
        """
        self._gradients.keep_local(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns gradients, averaged over processes.

        A tape around this one can differentiate them, unless they are sparse, compressed, or combined by Adasum.

        Args:
            target: what is differentiated, as in `tf.GradientTape.gradient`.
            sources: variables or tensors to differentiate by, in any structure.
            *args: further positional arguments of `tf.GradientTape.gradient`.
            **kwargs: keyword arguments of `tf.GradientTape.gradient`.

        Returns:
            Gradients in the structure of ``sources``; None for sources without a gradient, on all processes alike.
        """
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        return tf.nest.pack_sequence_as(sources, self._gradients.reduced(tf.nest.flatten(gradients), flat))
