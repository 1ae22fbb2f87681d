"""`AllReduceStrategy`: synchronous training on all devices of all processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.collectives import algorithms  # noqa: E402
from tfdist.compression import Method, policy  # noqa: E402
from tfdist.compression.compressor import Compressor  # noqa: E402
from tfdist.compression.policy import FewerWorkers, Policy, Schedule  # noqa: E402
from tfdist.engine import calibration  # noqa: E402
from tfdist.runtime import world  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.strategies import keras_saving, keras_seams  # noqa: E402
from tfdist.strategies.extended import AllReduceExtended  # noqa: E402

log = logging.getLogger("tfdist")


class AllReduceStrategy(tf.distribute.Strategy):
    """Trains one model on all devices of all processes of a job, in step.

    Every replica computes the gradient of its share of the global batch; a ring all-reduce sums them, and every
    replica takes the same step. The weights start equal (the chief's) and stay equal to the last bit.

    Five steps from a script for one process to one for many:

    1. ``strategy = tfdist.AllReduceStrategy()`` before anything else of TensorFlow runs.
    2. Build and compile the model inside ``with strategy.scope():``.
    3. Leave ``batch_size`` and the data alone: a batch is the *global* batch, and every process takes its share.
    4. Call ``fit``, ``evaluate``, ``predict`` and ``save`` on every process, as before.
    5. Start it: ``tfdist run -n 4 train.py``; or on every machine with TF_CONFIG; or under ``mpiexec``/``srun``.

    Example:
        >>> strategy = tfdist.AllReduceStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=256)

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` that says who takes part. By default
            an MPI launcher (mpiexec, srun) is asked, then TF_CONFIG, then Slurm; a process that nobody told
            anything runs alone.
        devices: this process's devices, such as ``["GPU:0", "GPU:1"]``; the same number on every process. By
            default the GPUs, shared out among the processes of a machine by local rank; the CPU when there is none.
        timeouts: how long to wait for other tasks; a `tfdist.Timeouts`.
        algorithm: how processes sum: ``"auto"`` chooses by the cost model, for every vector by its size, with what
            `tfdist bench` has measured, or else typical figures. By name: ``"ring"``, which sends the fewest bytes;
            ``"butterfly"`` or ``"tree"``, which send the fewest messages; ``"reduce_scatter_gather"``, which sends few
            of both where the number of processes is a power of two; ``"hierarchical"``, for several processes on each
            of several machines; ``"mpi"``, the library's own; or ``"naive"``. Sums of one algorithm and number of
            processes are equal to the last bit from run to run.
        compression: what is sent of gradients: a method of `tfdist.compression`, such as ``TopK(ratio=0.01)``, with
            which matrices of at least 1024 elements are compressed; a schedule over steps; or a policy that chooses by
            variable. Biased methods get `tfdist.compression.ErrorFeedback`. Nothing is compressed by default, nor
            are sparse gradients and whatever is no gradient of a Keras optimizer. Over shared memory it does not pay.
        check_weights: whether `fit` compares the weights of all ranks after each epoch, by a hash of each variable,
            and raises `MismatchError` with the first that is not equal.
        sum_sparse_rows: whether the rows of sparse gradients (of an `Embedding`) are summed where that sends fewer
            bytes than gathering them. Optimizers that square gradients then see the square of a sum, where one process
            squares each occurrence of a row.
        group: the processes that train this model together, this one among them; by default all of the job. Several
            groups may train different models at the same time, each with a strategy of its own.

    Raises:
        MismatchError: processes have different numbers of devices, algorithms or compression.
        TypeError: ``compression`` is nothing of the kind.
        CalibrationError: `TFDIST_CALIBRATION` names a file that was made on another machine.
        ClusterSpecError: TF_CONFIG or the resolver does not describe a cluster with this task in it.
        RendezvousError: not all tasks came, or this one was refused.
        MPIUnavailableError: no MPI library can be loaded.
    """

    # What MirroredExtended asks of its strategy; it is only used among this process's devices.
    _collective_key_base = 0

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
        algorithm: str = "auto",
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        check_weights: bool = True,
        sum_sparse_rows: bool = False,
        group: Group | None = None,
    ) -> None:
        algorithms.check(algorithm)
        policy.as_policy(compression)  # what it finds wrong is said before anybody is waited for
        cluster = discovery.discover(cluster_resolver)
        joined = world.join(cluster, timeouts or Timeouts.from_environment())
        chosen = list(devices) if devices is not None else default_devices(joined.local_rank, joined.local_size)
        if not chosen:
            raise ValueError("devices must name at least one device, such as ['CPU:0']; got an empty list")
        keras_seams.install()
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        self._local_rank = joined.local_rank
        own = joined.group if group is None else joined.group.subgroup(group.members())
        own = own.using(algorithm, calibration.agreed(own, algorithm))
        compressor = None if compression is None else Compressor(compression, own.rank, own.size)
        super().__init__(AllReduceExtended(self, own, chosen, compressor, check_weights, not sum_sparse_rows))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one of what TF_CONFIG or Slurm say.

        Under mpiexec, and for a process alone, it names no tasks.
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
        """This process's rank among those on its machine."""
        return self._local_rank

    def communication(self) -> dict[str, int]:
        """What this process has communicated since it started.

        Returns:
            ``collectives`` begun, and ``messages`` and ``bytes`` sent.
        """
        engine = self.extended.group.engine
        communicator = engine.communicator
        return {
            "collectives": engine.statistics.collectives,
            "messages": communicator.messages_sent,
            "bytes": communicator.bytes_sent,
        }

    def compression(self) -> dict[str, dict[str, int]]:
        """What compression has done since this process started, by the paths of the variables.

        Returns:
            For each variable whose gradient is compressed: ``given_bytes``, of its gradients; ``sent_bytes``, by this
            process to others; and ``plain_bytes``, that a ring all-reduce would have sent.
        """
        compressor = self.extended.compressor
        return {} if compressor is None else compressor.traffic()

    def save_compression(self, path: str) -> None:
        """Writes this process's residuals beside a checkpoint; for loops of your own. Call it on every process.

        `keras.callbacks.BackupAndRestore`, `keras.callbacks.ModelCheckpoint` and ``model.save`` do it by themselves.

        Args:
            path: of the checkpoint. The file's name is made from it, this rank and the number of processes.
        """
        if self.extended.compressor is not None:
            self.extended.compressor.save(path)

    def restore_compression(self, path: str) -> None:
        """Reads what `save_compression` wrote. Call it on every process; all of them begin anew if one cannot go on.

        Args:
            path: of the checkpoint.

        Raises:
            OSError: a file is damaged.
        """
        keras_saving.restore_compression(self.extended, path)


def default_devices(local_rank: int, local_size: int) -> list[str]:
    """This process's share of the machine's GPUs, which are hidden from TensorFlow but for it; or its CPU.

    Args:
        local_rank: of this process on its machine.
        local_size: how many processes share the machine.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return ["CPU:0"]
    if local_size > 1 and len(gpus) > 1:
        share = max(1, len(gpus) // local_size)
        first = (local_rank * share) % len(gpus)
        try:
            tf.config.set_visible_devices(gpus[first : first + share], "GPU")
        except RuntimeError as error:
            raise RuntimeError(
                "AllReduceStrategy must be made before TensorFlow uses a GPU, to pin one to each process: make it the "
                f"first thing after the imports ({error})"
            ) from None
    return [f"GPU:{index}" for index in range(len(tf.config.get_visible_devices("GPU")))]
