"""Sums in a graph over processes of one machine, by an operation in machine code and in memory that they share.

It does what the ring of `tfdist.collectives.ring` does, to the bit, with the tensors of a step as one vector, and takes
less time than a call of Python. The engine knows of it as far as others must: members agree on each call site in a
collective of the engine, and long waits, counts of calls and errors are the engine's.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdist.comm.shared import Place
from tfdist.engine import machine_code, operations
from tfdist.engine.beside import Totals, total
from tfdist.engine.call_order import in_order
from tfdist.engine.call_sites import call_site
from tfdist.engine.host_calls import check
from tfdist.engine.pending import Pending
from tfdist.errors import MismatchError, TfdistError
from tfdist.tensors import HOST

if TYPE_CHECKING:
    from tfdist.engine.group import ProcessGroup
    from tfdist.engine.patience import WaitMonitor

DTYPES = (tf.float32, tf.float64)
"""The dtypes that are summed."""

BUCKET_BYTES = 32 << 20
"""Bytes at which a bucket is closed. What has more is summed in several, the first while the graph computes."""

_OPEN, _OVER, _RECORD = -1.0, -2.0, -3.0
_MOST_OPEN = 4
"""Lists of shapes that a call site keeps memory for. Models that are made one after the other have the
same call sites."""


class SharedSums:
    """The sums of one group.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def is_usable(self) -> bool:
        """Whether the caller can sum here; the same on all members, as they trace the same functions."""
        return not tf.executing_eagerly() and self._group.memory is not None

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], names: Sequence[str], weight: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Sums tensors over all processes, from the graph under construction.

        Args:
            tensors: tensors of one of `DTYPES`, not all without elements, whose static shapes are known.
            names: names of the tensors, for messages.
            weight: float64 scalar that this process's tensors are multiplied by; see
                `tfdist.engine.bridge.Bridge.all_reduce`.
        """
        check("tfdist_sum")
        dtype = tensors[0].dtype
        key = call_site(f"shared sum of {len(tensors)} {dtype.name}", self._group.members)
        shapes = [tensor.shape for tensor in tensors]
        channel = _site(self._group, key).channel(shapes, dtype, ", ".join(names))
        is_elsewhere = tf.config.list_logical_devices("GPU") or not all(map(_is_on_host, tensors))
        if is_elsewhere and len(tensors) > 1:  # packed there, they cross in one copy
            tensors = [tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)]
        with in_order() as (order,), tf.device(HOST):
            factor = tf.constant(1.0, tf.float64) if weight is None else weight
            sums = machine_code.load().operations.tfdist_sum(
                tensors=tensors, weight=factor, order=order, channel=channel.number
            )
        if len(sums) < len(shapes):
            parts = tf.split(sums[0], [shape.num_elements() for shape in shapes])
            sums = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        return list(sums)


def _is_on_host(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is on the host, as far as its graph says where it is."""
    return not tensor.device or tensor.device.endswith("CPU:0")


class _Site:
    """A call site of a group.

    Args:
        group: the group.
        key: the key of the call site.
    """

    def __init__(self, group: ProcessGroup, key: str) -> None:
        self.group, self.key = group, key
        self._channels: dict[str, _Channel] = {}
        self.open: list[_Channel] = []

    def channel(self, shapes: Sequence[tf.TensorShape], dtype: tf.DType, contents: str) -> _Channel:
        """Returns the channel for tensors of these shapes; the same for all graphs."""
        described = ", ".join(f"{dtype.name} {shape}" for shape in shapes)
        with _making:
            if described not in self._channels:
                elements = sum(shape.num_elements() for shape in shapes)
                self._channels[described] = _Channel(self, described, elements, dtype, contents)
            return self._channels[described]

    def totals(self) -> Totals:
        """Returns the totals of the sums so far; see `tfdist.engine.beside.SiteBeside`."""
        return total(channel.totals() for channel in self._channels.copy().values())


class _Channel:
    """The memory that a call site sums tensors of some shapes in.

    Args:
        site: the call site.
        shapes: description of their dtypes and shapes.
        elements: number of their elements.
        dtype: their dtype.
        contents: description of the tensors, for messages.
    """

    def __init__(self, site: _Site, shapes: str, elements: int, dtype: tf.DType, contents: str) -> None:
        self._site, self._shapes = site, shapes
        self._elements, self._dtype, self._contents = elements, dtype, contents
        self._areas: list[np.ndarray] = []
        self._wait: tuple[Pending, WaitMonitor | None] | None = None
        is_recorded = ctypes.byref(site.group.engine.beside.is_recorded)
        self.number: int = machine_code.load().functions.tfdist_make(_ask, is_recorded)
        _channels[self.number] = self

    def open(self) -> None:
        """Opens the channel with the other members; called in its first sum, and in the next one after a `close`.

        Members call the sums of a site in the same order. So all open the same channel, and close the same one.

        Raises:
            TfdistError: another member sums other tensors, is lost, or did not come.
        """
        group, functions = self._site.group, machine_code.load().functions
        memory = group.memory
        assert memory is not None
        sizes = (ctypes.c_int64(self._elements), ctypes.c_int64(self._dtype.size))
        area = group.take(functions.tfdist_area_bytes(group.size, *sizes))
        area[:] = 0
        digest = int.from_bytes(hashlib.blake2b(self._shapes.encode(), digest_size=8).digest(), "little", signed=True)
        mine = np.array([*memory.place(area), digest], np.int64)
        plan = operations.all_gather_rows(mine[np.newaxis])
        rows, _ = group.run(self._site.key, plan, self._shapes, contents=self._contents)
        if len(set(rows[:, -1].tolist())) > 1:
            raise MismatchError(
                f"ranks sum tensors of different shapes at {self._site.key}: rank {group.members[group.rank]} sums "
                f"{self._shapes} ({self._contents}). Build the same model on every rank."
            )
        self._areas = [
            area if rank == group.rank else memory.view(group.members[rank], Place(*row.tolist()[:-1]), area.nbytes)
            for rank, row in enumerate(rows)
        ]
        addresses = (ctypes.c_void_p * group.size)(*(area.ctypes.data for area in self._areas))
        functions.tfdist_open(ctypes.c_int64(self.number), group.size, group.rank, *sizes, addresses)
        self._site.open = [*(other for other in self._site.open if other is not self), self]
        if len(self._site.open) > _MOST_OPEN:
            self._site.open.pop(0).close()  # all members have come here, and read no sum of an earlier call any more

    def totals(self) -> Totals:
        """Returns the totals of the sums in this memory."""
        counts = (ctypes.c_int64 * 4)()
        machine_code.load().functions.tfdist_totals(ctypes.c_int64(self.number), counts)
        sums, nanoseconds, messages, bytes_sent = counts
        return Totals(sums, 1e-9 * nanoseconds, messages, bytes_sent)

    def close(self) -> None:
        """Releases the memory."""
        machine_code.load().functions.tfdist_close(ctypes.c_int64(self.number))
        self._areas = []

    def goes_on(self, seconds: float) -> None:
        """Reports a wait, as `tfdist.engine.engine.Engine` does for its own.

        Raises:
            TfdistError: the wait is in vain.
        """
        group, engine = self._site.group, self._site.group.engine
        group.check()
        if self._wait is None:
            self._wait = engine.beside.waits_for(group.site(self._site.key), self._contents)
        pending, monitor = self._wait
        if monitor is None:
            return
        try:
            monitor.check(seconds)
        except TfdistError as error:
            engine.fail(error, pending.members)
            raise

    def record(self) -> None:
        """Records the sum that has just been made."""
        engine, (members, key) = self._site.group.engine, self._site.group.site(self._site.key)
        marks = (ctypes.c_double * 4)()
        machine_code.load().functions.tfdist_marks(ctypes.c_int64(self.number), marks)
        pending = Pending(key, members, self._contents)
        pending.call = engine.numbers.calls((members, key)) - 1
        if recorder := engine.timeline:
            recorder.ran(pending, list(marks))

    def over(self) -> None:
        """Ends the report of a wait."""
        if self._wait is not None:
            pending, monitor = self._wait
            self._wait = None
            self._site.group.engine.beside.over(pending)
            if monitor:
                monitor.over()


_channels: dict[int, _Channel] = {}
_making = threading.Lock()
"""Is held while sites and channels are made: threads that trace at the same time get the same ones."""


def _site(group: ProcessGroup, key: str) -> _Site:
    """Returns the call site of a key, one for all groups of the same members."""
    with _making:
        sites, site = group.engine.beside.sites, group.site(key)
        if site not in sites:
            sites[site] = _Site(group, key)
        made = sites[site]
        assert isinstance(made, _Site)
        return made


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_double)
def _ask(number: int, seconds: float) -> int:
    """Is called by a sum that cannot go on without Python; returns 1 after an error, of which the sum then speaks."""
    channel = _channels[number]
    try:
        if seconds == _OPEN:
            channel.open()
        elif seconds == _OVER:
            channel.over()
        elif seconds == _RECORD:
            channel.record()
        else:
            channel.goes_on(seconds)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()
        machine_code.load().functions.tfdist_explain(ctypes.c_int64(number), text)
        return 1
    return 0
