"""A gradient tape whose gradients are averaged over processes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.functional import engine_group
from tfdist.optimizers.gradients import Gradients, by_op
from tfdist.optimizers.local_clipping import LocalClipping
from tfdist.runtime.groups import Group


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over processes, each of which has its own data.

    Everything else is that of the tape, which may have recorded already::

        with tf.GradientTape() as tape:
            loss = …
        tape = tfdist.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    Call `tfdist.init` first, and start with equal weights (`tfdist.broadcast_variables`). All processes of the group
    ask for the same gradients, in the same order.

    Args:
        tape: new, or after recording.
        compression: as of `tfdist.DistributedOptimizer`.
        algorithm: as of `tfdist.DistributedOptimizer`.
        average: as of `tfdist.DistributedOptimizer`.
        op: as of `tfdist.DistributedOptimizer`.
        sparse_as_dense: as of `tfdist.DistributedOptimizer`.
        group: as of `tfdist.DistributedOptimizer`.
        scale_local_gradients: as of `tfdist.DistributedOptimizer`.
        local_clip_norm: as of `tfdist.DistributedOptimizer`.
        local_clip_global_norm: as of `tfdist.DistributedOptimizer`.
        local_clip_value: as of `tfdist.DistributedOptimizer`.

    Raises:
        RuntimeError: `tfdist.init` has not been called.
        TypeError: ``tape`` is no tape.
    """

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
        self._gradients = Gradients(
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
        """Leaves the gradients of a variable out: every process gets its own.

        Args:
            source: of Keras or TensorFlow.
        """
        self._gradients.keep_local(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients, averaged over processes.

        Args:
            target: as of `tf.GradientTape.gradient`.
            sources: as of `tf.GradientTape.gradient`.
            *args: as of `tf.GradientTape.gradient`.
            **kwargs: as of `tf.GradientTape.gradient`.

        A tape around this one has gradients of them, unless they are sparse, compressed, or combined by Adasum.

        Returns:
            Gradients in the structure of ``sources``; None where there is none, on all processes alike.
        """
        own = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        return tf.nest.pack_sequence_as(sources, self._gradients.reduced(tf.nest.flatten(own), flat))
