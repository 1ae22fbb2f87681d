"""Layers whose weights are split over an axis of a mesh: each process computes a part of the layer.

Without a mesh they are the layers of Keras that they are named after. Their files, initial values and results are
those of the layers of Keras in any case.

References:
    Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014.
    Shoeybi et al., Megatron-LM: Training multi-billion parameter language models using model parallelism, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfdist.model_parallel import parallel_features
from tfdist.private.keras import naming, symbolic_scope
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability
from tfdist.strategies.all_reduce import keras_weight_parts
from tfdist.strategies.divided import split_axis, weight_parts
from tfdist.strategies.divided.split_axis import Split, SplitAxis
from tfdist.strategies.divided_abilities import SplitsLayers

_WHOLE_LAYERS = {"ColumnParallelDense": "Dense", "RowParallelDense": "Dense", "ParallelEmbedding": "Embedding"}


@Once
def install() -> None:
    """Installs the seams, once."""
    replace(naming, "to_snake_case", _as_the_whole_layer)
    parallel_features.install()


def _as_the_whole_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives split layers the names that layers of Keras get by themselves, and those of their places in files."""

    def to_snake_case(name: Any) -> Any:
        return original(_WHOLE_LAYERS.get(name, name))

    return to_snake_case


class SplitLayer(keras.layers.Layer):
    """What split layers have in common.

    Args:
        arguments: those of the layer of Keras.
        mesh_axis: name of the mesh's axis over which the layer is split.
        options: those of the layer of Keras.
    """

    _cut: ClassVar[dict[str, int]]
    """By name, the axis along which a weight is cut."""
    _elements: ClassVar[str]
    """What there is one of along that axis, for messages."""

    def __init__(self, *arguments: Any, mesh_axis: str = "model", **options: Any) -> None:
        install()
        super().__init__(*arguments, **options)
        self.mesh_axis = mesh_axis
        self._parts = 1  # known before the weights are, which Keras makes later if it computes shapes first

    def add_weight(self, *arguments: Any, **options: Any) -> Any:
        """Adds a weight, of which each process keeps a part.

        Raises:
            ValueError: the strategy in use has no such mesh, the weight cannot be split over it, or it is quantized.
        """
        name = options.get("name", "")
        parts = self._number_of_parts() if name in self._cut else 1
        if parts == 1:
            return super().add_weight(*arguments, **options)
        if self.quantization_mode is not None:
            raise ValueError(f"{self._title()}: a quantized layer is not split; use it where there is no mesh")
        if options.get("constraint") is not None:
            raise ValueError(
                f"{self._title()}: a constraint looks at the whole weight {name!r}, of which each process has a part; "
                "use a regularizer"
            )
        self._parts = parts
        split = self._split(name)
        with keras_weight_parts.splitting(split):
            weight = super().add_weight(*arguments, **options)
        split_axis.ask_for(weight, split)
        return weight

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Calls the layer.

        Raises:
            ValueError: the features of the inputs are on several processes, and the layer takes whole rows.
        """
        title = parallel_features.left_by(inputs)
        if title and not self.takes_parts:
            raise ValueError(
                f"{title} leaves features on several processes (gather_output=False), and {self._title()} takes whole "
                "rows: use gather_output=True there, or RowParallelDense(input_is_parallel=True) here"
            )
        return super().__call__(inputs, *arguments, **options)

    def enable_lora(self, *arguments: Any, **options: Any) -> None:
        """Enables LoRA, where the layer is not split.

        Raises:
            ValueError: the layer is split.
        """
        self._check_whole("enable_lora")
        super().enable_lora(*arguments, **options)

    def quantize(self, mode: Any = None, **options: Any) -> None:
        """Quantizes the layer, where it is not split.

        Args:
            mode: as for the layer of Keras.
            options: those of the layer of Keras, which checks by ``type_check`` that it is not a subclass.

        Raises:
            ValueError: the layer is split.
        """
        self._check_whole("quantize")
        super().quantize(mode, **{**options, "type_check": False})

    def get_config(self) -> dict[str, Any]:
        """Returns the layer's configuration."""
        return {**super().get_config(), "mesh_axis": self.mesh_axis}

    @property
    def leaves_parts(self) -> bool:
        """Whether the layer leaves features of its outputs on several processes."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Whether the layer takes inputs whose features are on several processes."""
        return False

    def splits(self) -> list[tuple[Any, Split]]:
        """Returns the layer's weights that are split where there is a mesh, and how; the layer is built."""
        weights = ((getattr(self, name), self._split(name)) for name in self._cut)
        return [(weight, split) for weight, split in weights if weight is not None]

    def exchanged(self, inputs: float, outputs: float, parts: int) -> float:
        """Returns the bytes of activations that a process sends for them, forward and backward, at most.

        Args:
            inputs: bytes of the inputs for the process's own rows.
            outputs: bytes of the outputs for them, with all units.
            parts: number of processes along the axis.
        """
        raise NotImplementedError

    def _split(self, name: str) -> Split:
        return Split(self.mesh_axis, self._cut[name], self._title(), self._elements)

    def _title(self) -> str:
        return f"{type(self).__name__} {self.name}"

    def _number_of_parts(self) -> int:
        """Returns the number of parts of the layer's weights if they are made now."""
        extended = current_strategy.current(Ability)
        if extended is None:
            return 1
        if isinstance(extended, SplitsLayers):
            return extended.number_of_parts(self.mesh_axis)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"{self._title()} is split over the axis {self.mesh_axis!r} of a mesh: make it in the scope of "
                f"AllReduceStrategy or PipelineStrategy(mesh=tfdist.Mesh(…, {self.mesh_axis}=…)). The strategy in use "
                f"has no mesh; there, use keras.layers.{_WHOLE_LAYERS.get(type(self).__name__, 'Dense')}"
            )
        return 1

    def _computes_shapes(self, given: Any) -> bool:
        """Returns whether the layer is split, and a call only computes the shape of its outputs."""
        return self._parts > 1 and (symbolic_scope.in_symbolic_scope() or isinstance(given, keras.KerasTensor))

    def _check_whole(self, call: str) -> None:
        if self._parts > 1:
            raise ValueError(
                f"{self._title()}: {call} needs the whole layer, of which each process has a part. Save the model, and "
                "load it where there is no mesh"
            )


class _SplitDense(SplitLayer, keras.layers.Dense):
    """What split dense layers have in common."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the outputs for this process's rows; of units in parts, this process's ones for the rows of all.

        Raises:
            TypeError: the inputs are sparse, and the layer is split.
        """
        if self._computes_shapes(inputs):
            return _features(inputs, self.compute_output_shape(inputs.shape)[-1])
        axis = _axis_of(self.kernel)
        if axis is None:
            return super().call(inputs) if self._parts == 1 else self._without_parts(inputs)
        if isinstance(inputs, tf.SparseTensor):
            raise TypeError(f"{self._title()}: a split layer takes dense inputs; call tf.sparse.to_dense on them first")
        outputs = self._outputs(inputs, axis)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the mask of the outputs, for the rows that these have."""
        axis = _axis_of(self.kernel)
        if previous_mask is None or axis is None or self._computes_shapes(previous_mask):
            return previous_mask
        return self._mask(previous_mask, axis)

    def _outputs(self, inputs: Any, axis: SplitAxis) -> tf.Tensor:
        """Returns the outputs before the activation."""
        raise NotImplementedError

    def _without_parts(self, inputs: Any) -> tf.Tensor:
        """Returns what has the shape of the outputs, and takes as many operations, while no process has its parts yet.

        Raises:
            ValueError: the layer is to compute, and not only to tell its costs.
        """
        if tf.executing_eagerly():
            raise ValueError(
                f"{self._title()}: this process has no part of the weights yet: compile the model, or use a method of "
                "it such as predict, before it is called itself"
            )
        return super().call(inputs)

    def _mask(self, mask: Any, axis: SplitAxis) -> Any:
        """Returns the mask of the outputs for that of the inputs."""
        raise NotImplementedError

    def _own(self, axis: SplitAxis, *weights: Any) -> list[tf.Tensor]:
        """Returns this process's parts of weights, in the dtype that the layer computes in."""
        return [tf.cast(part, self.compute_dtype) for part in _own_parts(axis, *weights)]


@keras.saving.register_keras_serializable(package="tfdist")
class ColumnParallelDense(_SplitDense):
    """A `keras.layers.Dense` whose units are split over an axis of a mesh.

    Each process keeps its units' columns of the kernel. It takes the rows of all processes along the axis, computes its
    units for them, and gets all units of its own rows from the others.

    Example:
        >>> strategy = tfdist.AllReduceStrategy(mesh=tfdist.Mesh(data=2, model=2))  # under `tfdist run -n 4`
        >>> with strategy.scope():
        ...     model = keras.Sequential([
        ...         tfdist.layers.ColumnParallelDense(4096, "relu", gather_output=False),
        ...         tfdist.layers.RowParallelDense(10, input_is_parallel=True),
        ...     ])

    Args:
        units: number of units, a multiple of the number of processes along the axis.
        activation: as for `keras.layers.Dense`.
        mesh_axis: name of the mesh's axis over which the layer is split.
        gather_output: whether each process gets all units of its own rows. Otherwise each keeps its own units of the
            rows of all processes along the axis; give these to layers that act on each unit apart, such as `Dropout`,
            and then to a `RowParallelDense` with ``input_is_parallel=True``, which saves two exchanges. Other layers of
            Keras that get them are refused.
        options: as for `keras.layers.Dense`.

    Raises:
        ValueError: without ``gather_output``, the activation acts on all units, or there is a regularizer of them; or,
            when the layer is built, its units do not divide over the processes, or the strategy has no such axis.
    """

    _cut: ClassVar[dict[str, int]] = {"kernel": 1, "bias": 0}
    _elements = "units"

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        mesh_axis: str = "model",
        gather_output: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(units, activation, mesh_axis=mesh_axis, **options)
        self.gather_output = gather_output
        name = getattr(self.activation, "__name__", "")
        if not gather_output and name in parallel_features.OF_ALL_FEATURES:
            raise ValueError(
                f"{self._title()}: gather_output=False leaves units on several processes, and the activation {name} "
                "acts on all of them; use gather_output=True"
            )
        if not gather_output and self.activity_regularizer is not None:
            raise ValueError(
                f"{self._title()}: gather_output=False leaves units on several processes, and activity_regularizer "
                "looks at those of one; use gather_output=True"
            )

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Calls the layer, and notes whether its units are left on several processes."""
        outputs = super().__call__(inputs, *arguments, **options)
        if self.leaves_parts:
            parallel_features.leave(outputs, self._title())
        return outputs

    @property
    def leaves_parts(self) -> bool:
        """Whether the layer leaves features of its outputs on several processes."""
        return self._parts > 1 and not self.gather_output

    def exchanged(self, inputs: float, outputs: float, parts: int) -> float:
        """Returns the bytes that a process sends: inputs to all, and outputs by rows."""
        return 2 * (parts - 1) * (inputs + outputs / parts * self.gather_output)

    def _outputs(self, inputs: Any, axis: SplitAxis) -> tf.Tensor:
        rows, counts = axis.enter(inputs)
        kernel, *bias = self._own(axis, self.kernel, *([] if self.bias is None else [self.bias]))
        outputs = keras.ops.matmul(rows, kernel)
        if bias:
            outputs = keras.ops.add(outputs, bias[0])
        if self.gather_output:
            return axis.leave(outputs, counts)
        axis.note(counts)
        return outputs

    def _without_parts(self, inputs: Any) -> tf.Tensor:
        outputs = super()._without_parts(inputs)
        return outputs[..., : self.units // self._parts] if self.leaves_parts else outputs

    def _mask(self, mask: Any, axis: SplitAxis) -> Any:
        return mask if self.gather_output else axis.rows_of_all(mask, axis.noted(self._title()))

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns the shape of the outputs."""
        return (*input_shape[:-1], self.units // (1 if self.gather_output else self._parts))

    def get_config(self) -> dict[str, Any]:
        """Returns the layer's configuration."""
        return {**super().get_config(), "gather_output": self.gather_output}


@keras.saving.register_keras_serializable(package="tfdist")
class RowParallelDense(_SplitDense):
    """A `keras.layers.Dense` whose input features are split over an axis of a mesh.

    Each process keeps the rows of the kernel for its input features, and computes a term of the outputs for the rows of
    all processes along the axis. The terms are summed, and each process gets the sums for its own rows.

    Args:
        units: number of units.
        activation: as for `keras.layers.Dense`.
        mesh_axis: name of the mesh's axis over which the layer is split.
        input_is_parallel: whether the inputs are the units of a `ColumnParallelDense` without ``gather_output``.
            Otherwise they are this process's rows with all features, which are exchanged first.
        options: as for `keras.layers.Dense`.

    Raises:
        ValueError: when the layer is built: its input features do not divide over the processes, or the strategy has no
            such axis; or when it is called with ``input_is_parallel``: no such layer was called before.
    """

    _cut: ClassVar[dict[str, int]] = {"kernel": 0}
    _elements = "input features"

    def __init__(
        self,
        units: int,
        activation: Any = None,
        *,
        mesh_axis: str = "model",
        input_is_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(units, activation, mesh_axis=mesh_axis, **options)
        self.input_is_parallel = input_is_parallel

    def build(self, input_shape: Any) -> None:
        """Makes the weights.

        Args:
            input_shape: shape of the inputs; if they are parallel, with this process's features.
        """
        parts = self._number_of_parts() if self.input_is_parallel else 1
        super().build(_times(input_shape, parts))
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})

    def get_build_config(self) -> Any:
        """Returns what the layer is built with: the shape of inputs with all features."""
        config = super().get_build_config()
        if config and self.input_is_parallel:
            config = {**config, "input_shape": _times(config["input_shape"], self._parts)}
        return config

    def build_from_config(self, config: Any) -> None:
        """Builds the layer with what `get_build_config` has returned, perhaps on another number of processes."""
        parts = self._number_of_parts() if self.input_is_parallel else 1
        shape = config["input_shape"]
        self.build((*shape[:-1], shape[-1] // parts))

    @property
    def takes_parts(self) -> bool:
        """Whether the layer takes inputs whose features are on several processes."""
        return self.input_is_parallel

    def exchanged(self, inputs: float, outputs: float, parts: int) -> float:
        """Returns the bytes that a process sends: inputs by features, and terms of the outputs."""
        return 2 * (parts - 1) * (inputs / parts * (not self.input_is_parallel) + outputs)

    def _outputs(self, inputs: Any, axis: SplitAxis) -> tf.Tensor:
        if self.input_is_parallel:
            features, counts = inputs, axis.noted(self._title())
        else:
            features, counts = axis.enter_by_features(inputs)
        (kernel,) = self._own(axis, self.kernel)
        outputs = axis.leave_summed(keras.ops.matmul(features, kernel), counts)
        return outputs if self.bias is None else keras.ops.add(outputs, self.bias)

    def _without_parts(self, inputs: Any) -> tf.Tensor:
        return super()._without_parts(tf.concat([inputs] * self._parts, -1) if self.takes_parts else inputs)

    def _mask(self, mask: Any, axis: SplitAxis) -> Any:
        return axis.own_rows(mask, axis.noted(self._title())) if self.input_is_parallel else mask

    def get_config(self) -> dict[str, Any]:
        """Returns the layer's configuration."""
        return {**super().get_config(), "input_is_parallel": self.input_is_parallel}


@keras.saving.register_keras_serializable(package="tfdist")
class ParallelEmbedding(SplitLayer, keras.layers.Embedding):
    """A `keras.layers.Embedding` whose columns are split over an axis of a mesh.

    Each process keeps its columns of all rows, looks up the keys of all processes along the axis, and gets all columns
    for its own keys from the others. So all have the same work whatever keys occur, and 1/P of the embedded keys is
    sent, where a split by rows would send all.

    Args:
        input_dim: as for `keras.layers.Embedding`.
        output_dim: number of columns, a multiple of the number of processes along the axis.
        mesh_axis: name of the mesh's axis over which the layer is split.
        options: as for `keras.layers.Embedding`.

    Raises:
        ValueError: when the layer is built: its columns do not divide over the processes, or the strategy has no such
            axis.
    """

    _cut: ClassVar[dict[str, int]] = {"embeddings": 1}
    _elements = "columns"

    def __init__(self, input_dim: int, output_dim: int, *, mesh_axis: str = "model", **options: Any) -> None:
        super().__init__(input_dim, output_dim, mesh_axis=mesh_axis, **options)

    def call(self, inputs: Any) -> Any:
        """Returns the embedded keys of this process's rows."""
        axis = _axis_of(self.embeddings)
        if axis is None or symbolic_scope.in_symbolic_scope():
            return super().call(inputs)
        keys, counts = axis.enter(inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32))
        (columns,) = _own_parts(axis, self.embeddings)
        found = keras.ops.take(columns, keys, axis=0)
        return axis.leave(tf.cast(found, self.compute_dtype), counts)

    def exchanged(self, inputs: float, outputs: float, parts: int) -> float:
        """Returns the bytes that a process sends: keys to all, which have no gradient, and columns by rows."""
        return (parts - 1) * (inputs + 2 * outputs / parts)


def _axis_of(weight: Any) -> SplitAxis | None:
    """Returns the axis over which a weight is split; None if this process has all of it, or it is gathered."""
    kept = weight_parts.of(weight)
    return kept.collectives if kept is not None and isinstance(kept.collectives, SplitAxis) else None


def _own_parts(axis: SplitAxis, *weights: Any) -> list[tf.Tensor]:
    return axis.own([kept for weight in weights if (kept := weight_parts.of(weight)) is not None])


def _features(inputs: Any, number: int) -> tf.Tensor:
    """Returns zeros like the inputs, with another number of features."""
    return keras.ops.sum(inputs, axis=-1, keepdims=True) * tf.zeros([number], inputs.dtype)


def _times(shape: Any, factor: int) -> tuple[Any, ...]:
    return (*shape[:-1], shape[-1] * factor)
