"""The shapes of all tensors of a model, for a batch of a given size."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.model_parallel.model_calls import ModelCalls, clear_losses


def shapes_of(model_calls: ModelCalls, batch_size: int, open_size: int | None = None) -> dict[int, tf.TensorShape]:
    """Returns the shape of each tensor of a model.

    Keras's description of a tensor may lack a dimension that follows from the number of samples, as after
    ``ops.reshape(x, (ops.shape(x)[0], -1, 8))``. In that case the model is traced with inputs of known shape.

    Args:
        model_calls: the model's calls.
        batch_size: number of samples.
        open_size: size assumed for dimensions, other than the first, that the model's inputs leave open; None for none.

    Returns:
        Shapes by the tensors' keys; a dimension that is known at run time only is None.
    """
    tensors = model_calls.tensors
    described = {key: _of_batch(tensor.shape, batch_size, None) for key, tensor in tensors.items()}
    if all(shape.is_fully_defined() for shape in described.values()):
        return described
    inputs = {key: _of_batch(tensors[key].shape, batch_size, open_size) for key in model_calls.inputs}
    if not all(shape.is_fully_defined() for shape in inputs.values()):
        return described
    return {**described, **inputs, **_traced(model_calls, inputs)}


def _of_batch(shape: Any, batch_size: int, open_size: int | None) -> tf.TensorShape:
    sizes = enumerate(shape)
    return tf.TensorShape(
        [(batch_size if place == 0 else open_size) if size is None else size for place, size in sizes]
    )


def _traced(model_calls: ModelCalls, inputs: dict[int, tf.TensorShape]) -> dict[int, tf.TensorShape]:
    """Traces the calls, and returns the shapes of their tensors."""
    shapes: dict[int, tf.TensorShape] = {}

    @tf.function(autograph=False)
    def run(*values: Any) -> None:
        made = dict(zip(inputs, values, strict=True))
        model_calls.run(model_calls.calls, made)
        shapes.update({key: value.shape for key, value in made.items()})

    try:
        run.get_concrete_function(
            *(tf.TensorSpec(shape, model_calls.tensors[key].dtype) for key, shape in inputs.items())
        )
    finally:
        clear_losses(model_calls.calls)
    return shapes
