"""The base class of strategies whose processes each train on a part of the data."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster import discovery
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Cluster
from tfdist.engine import calibration
from tfdist.engine.group import ProcessGroup
from tfdist.runtime import world
from tfdist.runtime.groups import Group
from tfdist.strategies.devices import device_names
from tfdist.strategies.devices.devices import own_devices
from tfdist.strategies.keras import keras_saving, keras_seams


class Processes(tf.distribute.Strategy):
    """A strategy whose `extended` is a `tfdist.strategies.all_reduce.extended.AllReduceExtended`."""

    _cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver
    _local_rank: int

    def _enter(
        self,
        cluster: Cluster | None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        devices: Sequence[str] | None,
        timeouts: Timeouts,
        algorithm: str,
        group: Group | None,
    ) -> tuple[ProcessGroup, list[str]]:
        """Enters the job, before the base class is initialized.

        Args:
            cluster: the job's cluster; None for a process that trains alone.
            cluster_resolver: resolver that described the cluster; None if the environment did.
            devices: names of the devices that the user wants; None uses the GPUs, or the CPU if there are none.
            timeouts: how long to wait for other tasks.
            algorithm: name of the all-reduce algorithm.
            group: the processes that train this model together; None for all of the job.

        Returns:
            The processes that train this model together, and this process's devices.
        """
        if group is not None and not isinstance(group, Group):
            raise TypeError(f"{type(self).__name__}(group=…) must be a tfdist.Group; got {group!r}")
        if devices is not None:
            where = f"{type(self).__name__}(devices=…)"
            devices = device_names.all_resolved(where, devices)
            if len(set(devices)) < len(devices):
                raise ValueError(f"{where} must name each device once; got {devices}")
        entered = world.train(cluster, timeouts)
        chosen = own_devices(devices, entered.local_rank, entered.local_size)
        keras_seams.install_for(self)
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        self._local_rank = entered.local_rank
        engine_group = entered.group if group is None else entered.group.subgroup(group.members())
        return engine_group.using(algorithm, calibration.agreed(engine_group, algorithm)), chosen

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG or Slurm.

        Under mpiexec, and for a process that trains alone, it names no tasks.
        """
        return self._cluster_resolver

    @property
    def rank(self) -> int:
        """This process's rank in the group; the chief's is 0."""
        return self.extended.group.rank

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        return self.extended.group.size

    @property
    def local_rank(self) -> int:
        """This process's rank among the processes on its machine."""
        return self._local_rank

    def communication(self) -> dict[str, int]:
        """Returns the communication of this process since it started.

        Returns:
            The number of ``collectives`` begun, and of ``messages`` and ``bytes`` sent.
        """
        statistics = self.extended.group.engine.statistics
        return {
            "collectives": statistics.collectives,
            "messages": statistics.messages_sent,
            "bytes": statistics.bytes_sent,
        }

    def compression(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of compressed gradients since this process started, by variable path.

        Returns:
            For each variable whose gradient is compressed: ``given_bytes``, the size of its gradients;
            ``sent_bytes``, sent by this process to others; and ``plain_bytes``, which would have been sent without
            compression: by a ring all-reduce, or, with ``shard``, to the owners of parts.
        """
        compressor = self.extended.compressor
        return {} if compressor is None else compressor.traffic()

    def save_compression(self, path: str) -> None:
        """Writes this process's residuals beside a checkpoint, for custom training loops. Call it on every process.

        `keras.callbacks.BackupAndRestore`, `keras.callbacks.ModelCheckpoint` and ``model.save`` do this already.

        Args:
            path: path of the checkpoint. The file's name consists of it, this rank and the number of processes.
        """
        if self.extended.compressor is not None:
            self.extended.compressor.save(path)

    def restore_compression(self, path: str) -> None:
        """Reads the residuals that `save_compression` wrote. Call it on every process.

        If they cannot be restored on one process, all processes start without residuals.

        Args:
            path: path of the checkpoint.

        Raises:
            OSError: this process's file is damaged.
        """
        keras_saving.restore_compression(self.extended, path)
