"""Sums by TensorFlow's own collectives: by NCCL between GPUs, by a ring over gRPC between CPUs.

They move data between the processes' devices without this process's engine. What has no fixed shape, is compressed, or
is not to be just added, remains with the engine, and so do the small sums of a step.

A process sets them up once, before TensorFlow's first operation. After a failure all further sums fail, too.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import hosts
from tfdist.cluster.control import Control, Watcher
from tfdist.cluster.settings import Timeouts
from tfdist.engine import buckets
from tfdist.engine.group import ProcessGroup
from tfdist.engine.posting import concatenated, split
from tfdist.engine.weights import weighted_in_graph
from tfdist.errors import CollectiveTimeoutError, MismatchError, PeerLostError, TfdistError
from tfdist.private import tensorflow as private

_FIRST_KEY = 1 << 30
"""Number of the first group; TensorFlow's strategies count theirs from 1."""
_VERDICT_SECONDS = 5.0
"""Seconds in which the job finds out which process is lost, after a sum has failed."""
_LOOPBACK = "127.0.0.1"


class TensorFlowSums:
    """Sums of tensors over processes by TensorFlow's collectives.

    Args:
        group: the processes, at least two.
        device: this process's device, such as ``"GPU:0"``.
        host: host of this process, as the others reach it; None for the address that leads to other machines.
        timeouts: how long to wait for other processes.

    Raises:
        RuntimeError: TensorFlow has run an operation in this process, or sums among other processes.
        MismatchError: the processes have devices of different kinds.
    """

    def __init__(self, group: ProcessGroup, device: str, host: str | None, timeouts: Timeouts) -> None:
        self._group = group
        own = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
        self._links = _links(group, own.device_type, host, timeouts)
        self._device = f"{self._links.task}/device:{own.device_type}:{own.device_index}"
        key, self._order = self._links.line(self._device)
        self._options = {
            "group_size": group.size,
            "group_key": key,
            "communication_hint": "nccl" if own.device_type == "GPU" else "ring",
            "timeout_seconds": timeouts.collective,
        }

    def cause_of(self, error: tf.errors.OpError) -> TfdistError | None:
        """Returns the error of tfdist that an error of TensorFlow has come from; None if it is not that of a sum.

        TensorFlow may notice the loss of a process before the job does, which knows which one it is.
        """
        if "Collective" not in error.message:
            return None
        if "timed out" in error.message:
            return CollectiveTimeoutError(
                f"rank {self._group.engine.rank} waited {self._options['timeout_seconds']:g} s in a sum by TensorFlow "
                f"for ranks of {self._group} that are alive but did not take part. Check what they are doing; if they "
                "may take that long, raise TFDIST_COLLECTIVE_TIMEOUT."
            )
        self._links.known.wait(_VERDICT_SECONDS)
        return self._links.failure

    @staticmethod
    def takes(value: Any) -> bool:
        """Returns whether a value is summed here: a dense tensor of floating point, whose shape is fixed."""
        is_dense = isinstance(value, tf.Tensor) and value.dtype.is_floating
        return is_dense and value.shape.num_elements() is not None

    def all_reduce(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Sums each tensor over all processes; in a graph or eagerly.

        Args:
            tensors: tensors of which `takes` is true, of the same shapes on all processes, in the order in which they
                become available.
            weight: float64 scalar that this process's tensors are multiplied by; if it is 0 they count as zero.

        Returns:
            The sums, bitwise equal on all processes.
        """
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
        results: dict[int, tf.Tensor] = {}
        for bucket in buckets.plan(sizes, [tensor.dtype for tensor in tensors]):
            members = [tensors[place] for place in bucket.members]
            packed = concatenated(members)
            total = self._sum(packed if weight is None else weighted_in_graph(packed, weight))
            results.update(zip(bucket.members, split(total, [tensor.shape for tensor in members]), strict=True))
        return [results[place] for place in range(len(tensors))]

    def _sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Sums a tensor. All processes have the same sums in the same order, which a variable's handle keeps.

        TensorFlow binds a sum's key to a shape. Nothing else distinguishes sums, as they follow each other.
        """
        form = f"{vector.dtype.name} {vector.shape}"
        with tf.device(self._device):
            return tf.raw_ops.CollectiveReduceV2(
                input=vector,
                instance_key=zlib.crc32(form.encode()) >> 1,
                ordering_token=[self._order.handle],
                merge_op="Add",
                final_op="Id",
                **self._options,
            )


class _Links(Watcher):
    """TensorFlow's connections between the processes of a group; ends their collectives when one of them is lost.

    Args:
        group: the processes.
        control: this process's membership in its job.
        task: prefix of the names of this process's devices.
        patience: seconds for which a sum that has begun may go on after another process's script has ended.

    Attributes:
        group: as given.
        task: as given.
        failure: the error because of which no sum can complete any more; None if there is none.
        known: event that is set when there is such an error, and sums have been ended.
    """

    def __init__(self, group: ProcessGroup, control: Control, task: str, patience: float) -> None:
        self.group = group
        self.task = task
        self.failure: TfdistError | None = None
        self.known = threading.Event()
        self._control = control
        self._patience = patience
        self._lines: dict[str, tuple[int, tf.Variable]] = {}
        control.watch(self)

    def line(self, device: str) -> tuple[int, tf.Variable]:
        """Returns the number of a group of devices, and a variable whose handle keeps the order of all of its sums.

        Args:
            device: this process's device in the group. All processes name theirs in the same order.
        """
        if device not in self._lines:
            with tf.device(device):
                order = tf.Variable(0.0, trainable=False, name="tfdist_order_of_sums")
            self._lines[device] = _FIRST_KEY + len(self._lines), order
        return self._lines[device]

    def lost(self, task: int, error: TfdistError) -> None:
        """Ends sums, which need each process."""
        if task in self.group.members:
            self.failed(error)

    def left(self, task: int) -> None:
        """Ends sums that another process's script has ended without, which may be on their last bytes now."""
        if task not in self.group.members or task == self._control.task:
            return
        error = PeerLostError(
            f"rank {self.group.engine.rank} waits in a sum by TensorFlow, but {self._control.names[task]} has ended "
            "its script without it. Every rank must take the same steps."
        )
        timer = threading.Timer(self._patience, self.failed, [error])
        timer.daemon = True
        timer.start()

    def failed(self, error: TfdistError) -> None:
        """Ends all sums, now and later."""
        if self.failure is None:
            self.failure = error
            private.abort_collectives(str(error))
            self.known.set()


_lock = threading.Lock()
_made: _Links | None = None


def _links(group: ProcessGroup, kind: str, host: str | None, timeouts: Timeouts) -> _Links:
    """Returns the process's connections, which are made when they are first asked for."""
    global _made
    with _lock:
        if _made is None:
            _made = _connected(group, kind, host, timeouts)
        elif _made.group.members != group.members:
            raise RuntimeError(
                f"algorithm='tensorflow' sums among {_made.group} in this process, and cannot among {group}, too: "
                "TensorFlow is set up once. Use another algorithm for one of the two strategies."
            )
        return _made


def _connected(group: ProcessGroup, kind: str, host: str | None, timeouts: Timeouts) -> _Links:
    control = group.engine.control
    assert control is not None
    if len(set(group.hosts)) == 1:
        host = _LOOPBACK
    with socket.socket() as held:  # until TensorFlow listens there
        held.bind(("", 0))
        own = f"{host or hosts.outside_address()}:{held.getsockname()[1]}"
        given = control.gather(f"sums by TensorFlow of {group}", [own, kind], group.members)
    kinds = [kind for _, kind in given]
    if len(set(kinds)) > 1:
        raise MismatchError(
            "algorithm='tensorflow' needs devices of one kind on all processes; the ranks of "
            f"{group} have {', '.join(kinds)}"
        )
    try:
        task = private.enable_collectives([address for address, _ in given], group.rank)
    except RuntimeError as error:
        raise RuntimeError(
            "algorithm='tensorflow' must be set up before TensorFlow runs its first operation: make the strategy right "
            f"after the imports, and the data after it ({error})"
        ) from None
    except tf.errors.OpError as error:
        raise RuntimeError(f"TensorFlow cannot listen at {own} for algorithm='tensorflow': {error.message}") from None
    return _Links(group, control, task, timeouts.stall)
