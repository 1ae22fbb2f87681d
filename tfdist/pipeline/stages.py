"""The stages of a model: which calls each stage makes, and which tensors it sends to others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.model_parallel.model_calls import ModelCall, ModelCalls
from tfdist.pipeline.table import Edge
from tfdist.private.keras import backend


class Stages:
    """A model's calls in contiguous stages.

    The last stage computes losses and metrics, so earlier stages send it the model outputs that they make.

    Args:
        calls: the model's calls.
        ends: where each stage ends, as indices into the calls.

    Attributes:
        calls: as given.
        count: number of stages.
        edges: pairs of stages between which tensors are sent.

    Raises:
        ValueError: ``ends`` does not rise to the number of calls.
    """

    def __init__(self, calls: ModelCalls, ends: Sequence[int]) -> None:
        if list(ends) != sorted(set(ends)) or not ends or ends[0] < 1 or ends[-1] != len(calls.calls):
            raise ValueError(
                f"ends of stages must rise to the number of the model's calls, {len(calls.calls)}; got {list(ends)}"
            )
        self.calls = calls
        self.count = len(ends)
        begins = [0, *ends[:-1]]
        self._of_stages = [tuple(calls.calls[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        made = {
            key: stage
            for stage, stage_calls in enumerate(self._of_stages)
            for call in stage_calls
            for key in call.outputs
        }
        self._sent: dict[Edge, list[int]] = {}
        for stage in range(self.count):
            taken = calls.sources(self._of_stages[stage])
            if stage == self.count - 1:
                taken += [key for key in calls.outputs if key not in taken]
            for key in taken:
                if made.get(key, stage) != stage:
                    self._sent.setdefault((made[key], stage), []).append(key)
        self.edges = tuple(sorted(self._sent))

    def calls_of(self, stage: int) -> tuple[ModelCall, ...]:
        """Returns the calls of a stage.

        Args:
            stage: number of the stage, from 0.
        """
        return self._of_stages[stage]

    def sent(self, edge: Edge) -> tuple[int, ...]:
        """Returns the keys of the tensors that one stage sends to another.

        Args:
            edge: numbers of the sending and the receiving stage.
        """
        return tuple(self._sent.get(edge, ()))

    def differentiable(self, edge: Edge) -> tuple[int, ...]:
        """Returns the keys of the sent tensors for which gradients come back.

        Args:
            edge: numbers of the sending and the receiving stage.
        """
        return tuple(key for key in self.sent(edge) if _is_differentiable(self.calls.tensors[key]))

    def inputs(self, stage: int) -> tuple[int, ...]:
        """Returns the keys of the model's inputs that a stage takes.

        Args:
            stage: number of the stage, from 0.
        """
        taken = set(self.calls.sources(self._of_stages[stage]))
        if stage == self.count - 1:
            taken.update(self.calls.outputs)  # an input may be an output
        return tuple(key for key in self.calls.inputs if key in taken)

    def specs(self, keys: Sequence[int]) -> list[tf.TensorSpec]:
        """Returns the specs of tensors as they are sent, each followed by that of its mask if it has one.

        Args:
            keys: keys of the tensors.
        """
        specs = []
        for key in keys:
            tensor = self.calls.tensors[key]
            specs.append(tf.TensorSpec(tensor.shape, tensor.dtype))
            if self.has_mask(key):
                specs.append(self._masks[key])
        return specs

    def has_mask(self, key: int) -> bool:
        """Returns whether a tensor has a mask, which is sent with it.

        Args:
            key: key of the tensor.
        """
        return key in self._masks

    @functools.cached_property
    def _masks(self) -> dict[int, tf.TensorSpec]:
        """Specs of masks by the keys of their tensors, including masks that reach a model inside from around it."""
        masks: dict[int, tf.TensorSpec] = {}

        def run(*inputs: Any) -> list[Any]:
            values = dict(zip(self.calls.inputs, inputs, strict=True))
            self.calls.run(self.calls.calls, values)
            for key, value in values.items():
                mask = backend.get_keras_mask(value)
                if mask is not None:
                    masks[key] = tf.TensorSpec([None, *mask.shape[1:]], mask.dtype)
            return [values[key] for key in self.calls.outputs]

        backend.compute_output_spec(run, *(self.calls.tensors[key] for key in self.calls.inputs))
        return masks

    def layers(self, stage: int) -> list[Any]:
        """Returns the layers that a stage calls, each once.

        Args:
            stage: number of the stage, from 0.
        """
        operations = {id(call.operation): call.operation for call in self._of_stages[stage]}
        return [operation for operation in operations.values() if isinstance(operation, keras.Layer)]

    @functools.cached_property
    def homes(self) -> dict[int, tuple[int, ...]]:
        """The stages that call the layer of each variable, by the variable's `id`."""
        homes: dict[int, tuple[int, ...]] = {}
        for stage in range(self.count):
            for layer in self.layers(stage):
                for variable in layer.variables:
                    if stage not in homes.get(id(variable), ()):
                        homes[id(variable)] = (*homes.get(id(variable), ()), stage)
        return homes


def _is_differentiable(tensor: Any) -> bool:
    dtype = tf.as_dtype(tensor.dtype)
    return dtype.is_floating or dtype.is_complex
