"""Collectives for custom training loops, similar to Horovod's: ``tfdist.all_reduce``, ``tfdist.broadcast``, …

They work eagerly and in graphs (`join` only eagerly), with tensors on CPUs and GPUs. Collectives that return tensors
have gradients; `send` and `receive` have none. Every rank of the group must call the same collectives; otherwise an
error or a warning names the ranks that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfdist import other_names
from tfdist.strategies import require_tensorflow
from tfdist.tensors import map_values

require_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.engine.bridge import Bridge  # noqa: E402
from tfdist.engine.exchange import Exchange  # noqa: E402
from tfdist.engine.slices import Slices  # noqa: E402
from tfdist.initialization import context, rank, size  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402

_COMBINE = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}
Adasum = "adasum"
"""The ``op`` of adaptive summation: parallel gradients are averaged, orthogonal gradients are added.

Two gradients a and b become (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, for each tensor by itself. With more processes,
gradients are combined in pairs, by the distance of their ranks (Maleki et al., Scaling distributed training with
adaptive summation, 2020). Adaptive summation suits the learning rate of a single process. Each process exchanges full
vectors with log₂ P partners.
"""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_converted(function: _Function) -> _Function:
    """Disables AutoGraph. Type checkers keep the signature, in contrast to TensorFlow's decorator without types."""
    return tf.autograph.experimental.do_not_convert(function)


_as_in_horovod = other_names.hint_unknown_arguments(other_names.HOROVOD_ARGUMENTS)


@_not_converted
@_as_in_horovod
def all_reduce(value: Any, op: str = "mean", group: Group | None = None) -> Any:
    """Combines values over the processes; every process gets the result.

    Args:
        value: tensor or nested structure of tensors, which are reduced together; of the same shapes and dtypes on
            every process. `tf.IndexedSlices` may have different rows on each process, and can be summed and, unless
            they are of integers, averaged: the result holds the rows of all processes, in the order of their ranks.
            None (the gradient of an unconnected variable) stays None.
        op: the reduction: ``"mean"`` (integers are rounded towards zero), ``"sum"``, ``"min"``, ``"max"``,
            ``"product"``, or `tfdist.Adasum` for dense floating-point tensors. A mean does not overflow if it is within
            the range of its dtype.
        group: the processes that take part; all by default.

    Returns:
        The results in the same structure, bitwise equal on all processes. The gradient, for sum and mean, is the sum or
        mean of the processes' gradients.
    """
    if op not in (*_COMBINE, Adasum):
        raise ValueError(f"op must be one of {', '.join((*_COMBINE, Adasum))}; got {op!r}")
    collectives = context().among(group)
    results: dict[int, Any] = {}
    dense: list[tuple[int, tf.Tensor]] = []
    sparse: list[tuple[int, tf.IndexedSlices]] = []
    flat = tf.nest.flatten(value)
    for place, part in enumerate(flat):
        if part is None:
            results[place] = None
        elif isinstance(part, tf.IndexedSlices):
            sparse.append((place, part))
        else:
            dense.append((place, _tensor("all_reduce", part, adds=True)))
    if dense:
        places, tensors = zip(*dense, strict=True)
        results.update(zip(places, _dense(collectives.bridge, list(tensors), op, group), strict=True))
    if sparse:
        places, slices = zip(*sparse, strict=True)
        results.update(zip(places, _sparse(collectives.slices, list(slices), op, group), strict=True))
    return tf.nest.pack_sequence_as(value, [results[place] for place in range(len(flat))])


def _sparse(sums: Slices, slices: list[tf.IndexedSlices], op: str, group: Group | None) -> list[tf.IndexedSlices]:
    if op not in ("sum", "mean"):
        raise ValueError(
            f"op must be 'sum' or 'mean' for IndexedSlices; got {op!r}. Convert them with tf.convert_to_tensor first"
        )
    if op == "mean" and any(given.dtype.is_integer for given in slices):
        raise ValueError(
            "a mean of IndexedSlices of integers would round each process's rows, not their mean; use op='sum', or "
            "cast the values to a floating-point type"
        )
    totals = sums.all_reduce(slices)
    if op == "sum":
        return totals
    count = _size(group)
    return [map_values(lambda rows: rows / tf.cast(count, rows.dtype), total) for total in totals]


def _dense(bridge: Bridge, tensors: list[tf.Tensor], op: str, group: Group | None) -> list[tf.Tensor]:
    if op == Adasum and not all(tensor.dtype.is_floating for tensor in tensors):
        raise TypeError(
            f"adaptive summation takes floating-point tensors; got {[operand.dtype.name for operand in tensors]}"
        )

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        combine = _COMBINE.get(op, np.add)
        outputs = bridge.all_reduce(inputs, combine=combine, verb=op, mean=op == "mean", adaptive=op == Adasum)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in ("sum", "mean"):
                raise ValueError(f"all_reduce has a gradient for 'sum' and 'mean', not for {op!r}")
            return _dense(bridge, [tf.convert_to_tensor(tensor) for tensor in upstream], op, group)

        return outputs, gradient

    return list(reduced(*tensors))


@_not_converted
@_as_in_horovod
def all_gather(tensor: Any, axis: int = 0, group: Group | None = None) -> tf.Tensor:
    """Concatenates a tensor over the processes, in the order of their ranks.

    Args:
        tensor: tensor of at least one dimension; all dimensions but ``axis`` are the same on every process.
        axis: the dimension to concatenate along.
        group: the processes that take part; all by default.

    Returns:
        The concatenation, on every process. Its gradient is each process's part of the sum of all gradients.
    """
    exchange = context().among(group).exchange
    value = _tensor("all_gather", tensor)
    rank_of = value.shape.rank
    if rank_of is None or not -rank_of <= axis < rank_of:
        return exchange.all_gather(value, axis)  # raises the error
    axis %= rank_of
    if not axis:
        return _gathered(exchange, value)
    order = [axis, *(other for other in range(rank_of) if other != axis)]
    return tf.transpose(_gathered(exchange, tf.transpose(value, order), axis), np.argsort(order))


# `_gathered` and `_scattered` are each other's gradients, so gradients of any order exist.


def _gathered(exchange: Exchange, rows: tf.Tensor, axis: int = 0) -> tf.Tensor:
    @tf.custom_gradient
    def gathered(part: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _scattered(exchange, tf.convert_to_tensor(upstream), "sum", tf.shape(part, tf.int64)[0])

        return exchange.gather_rows(part, axis), gradient

    return gathered(rows)


def _scattered(
    exchange: Exchange, tensor: tf.Tensor, op: str, rows: tf.Tensor | None = None, count: int = 1
) -> tf.Tensor:
    @tf.custom_gradient
    def scattered(whole: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if op not in ("sum", "mean"):
                raise ValueError(f"reduce_scatter has a gradient for 'sum' and 'mean', not for {op!r}")
            return _gathered(exchange, tf.convert_to_tensor(upstream) / tf.cast(count, upstream.dtype))

        return exchange.reduce_scatter(whole, _COMBINE[op], rows, op, op == "mean"), gradient

    return scattered(tensor)


@_not_converted
@_as_in_horovod
def reduce_scatter(tensor: Any, op: str = "mean", group: Group | None = None) -> tf.Tensor:
    """Combines a tensor over the processes, and gives each process its share of the result's rows.

    Args:
        tensor: tensor of at least one dimension, of the same shape and dtype on every process.
        op: the reduction, as in `all_reduce` but without `tfdist.Adasum`.
        group: the processes that take part; all by default.

    Returns:
        This process's rows. All processes get the same number of rows, and the first processes one more if rows do not
        divide evenly. The gradient, for sum and mean, is the concatenation of the processes' gradients (divided by
        their number, for mean).
    """
    if op not in _COMBINE:
        raise ValueError(f"op must be one of {', '.join(_COMBINE)}; got {op!r}")
    exchange = context().among(group).exchange
    whole = _tensor("reduce_scatter", tensor, adds=True)
    return _scattered(exchange, whole, op, count=_size(group) if op == "mean" else 1)


@_not_converted
@_as_in_horovod
def broadcast(tensor: Any, root_rank: int = 0, group: Group | None = None) -> tf.Tensor:
    """Sends one process's tensor to every process.

    Args:
        tensor: tensor of the same shape and dtype on every process.
        root_rank: rank in the job of the process whose tensor is sent; it must be in the group.
        group: the processes that take part; all by default.

    Returns:
        The root's tensor. The gradient is the sum of all gradients on the root, and zero elsewhere.
    """
    return _sent(_tensor("broadcast", tensor), root_rank, _place(root_rank, group), group)


# `_sent` and `_summed_to` are each other's gradients, too.


def _sent(tensor: tf.Tensor, root_rank: int, place: int, group: Group | None) -> tf.Tensor:
    @tf.custom_gradient
    def sent(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _summed_to(tf.convert_to_tensor(upstream), root_rank, place, group)

        return context().among(group).exchange.broadcast(value, place), gradient

    return sent(tensor)


def _summed_to(tensor: tf.Tensor, root_rank: int, place: int, group: Group | None) -> tf.Tensor:
    @tf.custom_gradient
    def summed(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        (total,) = context().among(group).bridge.all_reduce([value], verb=f"sum to place {place}")

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _sent(tf.convert_to_tensor(upstream), root_rank, place, group)

        if rank() != root_rank:
            with tf.control_dependencies([total]):  # a graph would leave out the sum, which the others wait for
                total = tf.identity(tf.zeros_like(total))
        return total, gradient

    return summed(tensor)


@_not_converted
def broadcast_variables(variables: Sequence[Any], root_rank: int = 0, group: Group | None = None) -> None:
    """Assigns one process's values to the variables of every process.

    Args:
        variables: TensorFlow or Keras variables, of the same shapes and dtypes on every process.
        root_rank: rank in the job of the process whose values are sent; it must be in the group.
        group: the processes that take part; all by default.
    """
    if isinstance(variables, (tf.Variable, keras.Variable)):
        raise TypeError("broadcast_variables takes a list of variables; got one: put it in a list")
    for variable in variables:
        variable.assign(broadcast(tf.convert_to_tensor(variable), root_rank, group))


@_not_converted
@_as_in_horovod
def all_to_all(tensor: Any, splits: Any = None, group: Group | None = None) -> Any:
    """Sends some rows to every process, and receives some from every process.

    Args:
        tensor: tensor of at least one dimension; all dimensions but the first are the same on every process.
        splits: number of rows for each process, in the order of the ranks; equal shares by default.
        group: the processes that take part; all by default.

    Returns:
        The received rows, in the order of the ranks; with ``splits``, also the number of rows from each rank (int64).
        The gradient sends every row's gradient back.
    """
    exchange, count = context().among(group).exchange, _size(group)
    value = _tensor("all_to_all", tensor)
    if splits is not None:
        given = tf.convert_to_tensor(splits)
        if not given.dtype.is_integer:
            raise TypeError(f"all_to_all: splits must be whole numbers of rows; got {given.dtype.name}")
        return _exchanged(exchange, value, tf.cast(given, tf.int64))
    if value.shape.rank and value.shape[0] is not None and value.shape[0] % count:
        raise ValueError(
            f"without splits, the number of rows must be divisible by the {count} processes; got {value.shape[0]}"
        )
    rows = tf.shape(value, tf.int64)[0] if value.shape.rank else tf.constant(0, tf.int64)
    return _exchanged(exchange, value, tf.fill([count], rows // count))[0]


def _exchanged(exchange: Exchange, tensor: tf.Tensor, given: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    @tf.custom_gradient
    def exchanged(rows: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
        taken, taken_splits = exchange.all_to_all(rows, given)

        def gradient(upstream: tf.Tensor, of_splits: tf.Tensor | None = None) -> tf.Tensor:
            return _exchanged(exchange, tf.convert_to_tensor(upstream), taken_splits)[0]

        return (taken, taken_splits), gradient

    return exchanged(tensor)


@_not_converted
def send(tensor: Any, destination: int, edge: str = "", group: Group | None = None) -> None:
    """Starts to send a tensor to one process, and returns without waiting for the receiver.

    Sending has no gradient: send gradients back along another edge, in a `tf.custom_gradient`.

    Args:
        tensor: dense numeric tensor.
        destination: rank in the job of the receiver; it must be in the group.
        edge: name of the connection between the two ranks; a different name for each dtype and number of dimensions.
            The n-th tensor that is received along an edge is the n-th that was sent.
        group: the processes among which edge names are unique; all by default.
    """
    if isinstance(tensor, np.ndarray):
        tensor = tensor.copy()  # TensorFlow may share the array's memory, and the caller may overwrite it afterwards
    context().among(group).edges.send(_tensor("send", tensor), _place(destination, group), edge)


@_not_converted
def receive(spec: tf.TensorSpec, source: int, edge: str = "", group: Group | None = None) -> tf.Tensor:
    """Waits for a tensor from one process.

    Args:
        spec: dtype and shape of the tensor, with None for dimensions that the sender decides.
        source: rank in the job of the sender; it must be in the group.
        edge: name of the connection between the two ranks; see `send`.
        group: the processes among which edge names are unique; all by default.

    Returns:
        The tensor.
    """
    return context().among(group).edges.receive(spec, _place(source, group), edge)


@_not_converted
def barrier(group: Group | None = None) -> None:
    """Waits until every process has called this.

    Args:
        group: the processes that take part; all by default.
    """
    context().among(group).exchange.barrier()


@_not_converted
def join() -> int:
    """Declares that this process has no more data, and contributes zeros to the others' collectives until all join.

    The others' sums, gathers and barriers continue. A mean still divides by the number of all processes, like
    Horovod's. Call this function only from eager code.

    Returns:
        The rank that joined last. That rank has taken every step, so broadcast the variables from it.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("tfdist.join must be called from eager code, not inside a tf.function")
    return context().group.join()


def _tensor(name: str, value: Any, adds: bool = False) -> tf.Tensor:
    """Converts a user's value to a dense numeric tensor."""
    if isinstance(value, (tf.RaggedTensor, tf.sparse.SparseTensor)):
        raise TypeError(f"{name} takes dense tensors; got a {type(value).__name__}: pass its component tensors")
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or (dtype.is_bool and not adds)):
        advice = "cast it to an integer type first" if dtype.is_bool else "encode it as numbers first"
        raise TypeError(f"{name} takes tensors of numbers; got {dtype.name}: {advice}")
    return tensor


def _size(group: Group | None) -> int:
    return size() if group is None else group.size


def _place(of_job: int, group: Group | None) -> int:
    """Returns the rank in a group that belongs to a rank in the job."""
    ranks = range(size()) if group is None else group.ranks
    if of_job not in ranks:
        raise ValueError(f"the rank must be one of the ranks {list(ranks)}; got {of_job!r}")
    return ranks.index(of_job)
