"""A Keras optimizer that averages gradients over processes."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import other_names, whole_numbers
from tfdist.compression.policy import Choice, Policy, Schedule
from tfdist.initialization import engine_group
from tfdist.optimizers import keras_optimizers
from tfdist.optimizers.gradients import GradientAverager, by_op
from tfdist.optimizers.local_clipping import LocalClipping
from tfdist.runtime.groups import Group
from tfdist.strategies.keras.keras_optimizers import innermost


@other_names.hint_unknown_arguments(other_names.HOROVOD_ARGUMENTS)
def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: Choice | Schedule | Policy = None,
    algorithm: str | None = None,
    average: bool = True,
    op: str | None = None,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    group: Group | None = None,
    scale_local_gradients: bool = True,
    local_clip_norm: float | None = None,
    local_clip_global_norm: float | None = None,
    local_clip_value: float | None = None,
    float32_sums: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer average its gradients over processes that each have a share of the data.

    For scripts in Horovod's style, in ``fit``, in custom loops and eagerly; without a strategy's scope. Call
    `tfdist.init` first, and start with equal weights: `tfdist.callbacks.BroadcastVariables` in ``fit``,
    `tfdist.broadcast_variables` in a loop.

    Gradients are averaged before Keras does anything else with them, so that clipping, weight decay, moving averages
    and the check for infinities (`keras.optimizers.LossScaleOptimizer`, around this optimizer or inside it) work as on
    one process that has the whole batch. Gradients that Keras accumulates are averaged when they are applied.

    The optimizer itself is changed and returned. It keeps its class, configuration and variables, so it is saved and
    loaded as without tfdist. A loaded or copied optimizer is a plain Keras optimizer: wrap it again. The optimizer also
    gets a method ``register_local_var(variable)``, which excludes a variable's gradients from averaging: every process
    then uses its own.

    Args:
        optimizer: a Keras 3 optimizer, new or in use. In a `keras.optimizers.LossScaleOptimizer` or a
            `tfdist.optimizers.GradientNoise`, the inner optimizer averages.
        compression: how gradients are compressed; see `tfdist.AllReduceStrategy`.
        algorithm: the all-reduce algorithm; by default that of `tfdist.init`.
        average: whether gradients are averaged; otherwise they are summed.
        op: "mean" or "sum", in place of ``average``; or `tfdist.Adasum`.
        backward_passes_per_step: number of calls of ``apply`` whose mean gradient is averaged and applied, like the
            optimizer's own ``gradient_accumulation_steps``. Horovod sums the gradients, unless told otherwise.
        sparse_as_dense: whether sparse gradients, of embeddings, are made dense before they are averaged.
        group: the processes that take part; all by default.
        scale_local_gradients: whether gradients of local variables are divided by the number of processes where other
            gradients are averaged, as if the other processes had zeros.
        local_clip_norm: largest norm of each gradient of this process's data, before averaging. The clipping of the
            optimizer itself (``clipnorm``, …) acts on the average.
        local_clip_global_norm: largest norm of all gradients of this process's data together.
        local_clip_value: largest absolute value of an element of the gradients of this process's data.
        float32_sums: whether gradients of half precision are summed in float32; see `tfdist.AllReduceStrategy`.

    Returns:
        ``optimizer``.

    Raises:
        RuntimeError: `tfdist.init` has not been called.
        TypeError: ``optimizer`` is not a Keras 3 optimizer.
        ValueError: the optimizer averages already, or an argument is out of its range.

    References:
        Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes a Keras 3 optimizer, such as keras.optimizers.Adam(); got {optimizer!r}. "
            "Make one from its name with keras.optimizers.get(name)."
        )
    processes = engine_group(group, algorithm)
    inner = innermost(optimizer)
    if keras_optimizers.gradients_of(inner) is not None:
        raise ValueError("the optimizer averages its gradients already: wrap it in DistributedOptimizer only once")
    whole_numbers.check("backward_passes_per_step", backward_passes_per_step)
    if backward_passes_per_step > 1:
        _accumulate(inner, backward_passes_per_step)
    gradients = GradientAverager(
        processes,
        *by_op(op, average),
        compression,
        sparse_as_dense,
        scale_local_gradients,
        LocalClipping(local_clip_norm, local_clip_global_norm, local_clip_value),
        float32_sums=float32_sums,
    )
    keras_optimizers.attach(inner, gradients)
    optimizer.register_local_var = gradients.keep_local
    return optimizer


def _accumulate(optimizer: Any, steps: int) -> None:
    if optimizer.gradient_accumulation_steps not in (None, steps):
        raise ValueError(
            f"the optimizer accumulates {optimizer.gradient_accumulation_steps} gradients already; leave out "
            "backward_passes_per_step, which means the same"
        )
    if optimizer.built and optimizer.gradient_accumulation_steps is None:
        raise ValueError(
            "backward_passes_per_step needs variables for the sums, which an optimizer makes when it is built: wrap it "
            "before it is built, or make it with gradient_accumulation_steps"
        )
    optimizer.gradient_accumulation_steps = steps
