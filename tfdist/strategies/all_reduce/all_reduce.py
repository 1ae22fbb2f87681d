"""`AllReduceStrategy`: synchronous training on all devices of all processes."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

from tfdist.strategies import require_tensorflow

require_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.collectives import algorithms  # noqa: E402
from tfdist.compression import Method, policy  # noqa: E402
from tfdist.compression.compressor import Compressor  # noqa: E402
from tfdist.compression.policy import FewerWorkers, Policy, Schedule  # noqa: E402
from tfdist.engine.tensorflow_sums import TensorFlowSums  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.runtime.mesh import Mesh  # noqa: E402
from tfdist.strategies.abilities import DelaysUpdates  # noqa: E402
from tfdist.strategies.all_reduce import keras_delayed  # noqa: E402
from tfdist.strategies.all_reduce.delayed_extended import DelayedExtended  # noqa: E402
from tfdist.strategies.all_reduce.extended import AllReduceExtended  # noqa: E402
from tfdist.strategies.all_reduce.mesh_extended import MeshExtended  # noqa: E402
from tfdist.strategies.all_reduce.processes import Processes  # noqa: E402
from tfdist.strategies.all_reduce.sharded_extended import ShardedExtended  # noqa: E402
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended  # noqa: E402

log = logging.getLogger("tfdist")


class AllReduceStrategy(Processes):
    """Synchronous data-parallel training on all devices of all processes of a job.

    Every replica computes the gradient of its share of the global batch; an all-reduce sums the gradients, and every
    replica takes the same step. The weights start equal (the chief's) and stay equal to the last bit.

    To turn a script for one process into one for many:

    1. ``strategy = tfdist.AllReduceStrategy()`` before anything else of TensorFlow runs.
    2. Build and compile the model inside ``with strategy.scope():``.
    3. Do not change ``batch_size`` or the data: a batch is the *global* batch, and every process takes its share.
    4. Call ``fit``, ``evaluate``, ``predict`` and ``save`` on every process, as before.
    5. Start it: ``tfdist run -n 4 train.py``; or on every machine with TF_CONFIG; or under ``mpiexec``/``srun``.

    In a job with parameter servers (``tfdist run -n 4 --ps 2``) the servers hold the rows of each
    `tfdist.layers.DynamicEmbedding`; all other variables are trained by all-reduce. On a ``ps`` task the constructor
    serves until the job is over, and then ends the process.

    Example:
        >>> strategy = tfdist.AllReduceStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=256)

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` that describes the cluster. By default
            the cluster is taken from the MPI launcher (mpiexec, srun), else from TF_CONFIG, else from Slurm; without
            any of them the process trains alone.
        devices: this process's devices, such as ``["GPU:0", "GPU:1"]``; the same number on every process. By
            default the machine's GPUs, divided among its processes by local rank, or the CPU if there are none.
        timeouts: how long to wait for other tasks; a `tfdist.Timeouts`.
        algorithm: the all-reduce algorithm. ``"auto"`` chooses one for every vector by its size, with a cost model
            that uses the figures `tfdist bench` measured, or else typical figures. By name: ``"ring"``, which sends
            the fewest bytes; ``"butterfly"`` or ``"tree"``, which send the fewest messages;
            ``"reduce_scatter_gather"``, which sends few of both if the number of processes is a power of two;
            ``"hierarchical"``, for several processes on each of several machines; ``"mpi"``, the MPI library's own; or
            ``"naive"``. ``"tensorflow"`` has TensorFlow's own collectives sum gradients: between GPUs NCCL, so that
            they do not pass through the hosts; between CPUs it is slower than the others. Make the strategy before
            TensorFlow's first operation then; each process needs a GPU of its own. With the same algorithm and number
            of processes, sums are bitwise equal from run to run.
        compression: how gradients are compressed: a method of `tfdist.compression`, such as ``TopK(ratio=0.01)``,
            which is applied to matrices of at least 1024 elements; a schedule over steps; or a policy that chooses by
            variable. Biased methods get `tfdist.compression.ErrorFeedback`. By default nothing is compressed. Sparse
            gradients, and tensors that are not gradients of a Keras optimizer, never are. Over shared memory
            compression does not pay.
        check_weights: whether `fit` compares the weights of all ranks after each epoch, by a hash of each variable,
            and raises `MismatchError` for the first that is not equal.
        sum_sparse_rows: whether the rows of sparse gradients (of an `Embedding`) are summed where that sends fewer
            bytes than gathering them. Optimizers that square gradients then square the sum, where one process squares
            each occurrence of a row.
        group: the processes that train this model together, including this one; by default all of the job. Several
            groups may train different models at the same time, each with its own strategy.
        cpu_relocation: whether the weights and the optimizer's variables are in the memory of the CPU, a copy for each
            device, and are updated there; devices read them in each step. For models that do not fit otherwise.
        delay: number of steps by which updates are late, 0 or 1. With 1 the gradients of a step are summed while the
            next one computes, and the update follows after that step; an epoch's last update is made at its end.
            Gradients are then one update old, which `tfdist.callbacks.StalenessReport` counts. Use it where a sum takes
            about as long as a step, and lower the learning rate or warm it up. For one device in each process, without
            loss scaling and gradient accumulation.
        float32_sums: whether gradients of half precision (float16, bfloat16) are summed in float32 and then rounded, so
            that the sum of many replicas is rounded once; they take twice the traffic. Only models whose variables are
            of half precision have such gradients: under Keras's mixed precision they are float32. With gradient
            accumulation, or several devices in a process, they are weighed by samples in half precision before.
        shard: ``"optimizer"`` divides the optimizer's variables among the processes (ZeRO-1). Each process gets the
            sums of some gradients, updates those weights, and sends them to the others; results are the same, and the
            traffic is that of an all-reduce. Large weights are cut by rows if the optimizer updates each element apart;
            the others are dealt whole, the largest first. ``"weights"`` divides large weights and their gradients, too
            (ZeRO-3): they are gathered when they are used, as ``gather`` says. All processes then call `save`,
            `save_weights` and the like, and with ``"weights"`` whatever reads weights; files are the same as without.
            By default each process has all variables. For one device in each process, without ``delay``; with
            ``compression``, by methods that can encode parts of gradients.
        gather: when weights in parts are gathered (``shard="weights"``). ``"layer"``: by each layer when it is called,
            and again in its backward pass, so a process has those of about two layers at a time, and sends half as much
            again as with an all-reduce. ``"model"``: those of the whole model when it is called, once; a process has
            them until the backward pass, and sends what an all-reduce sends.
        mesh: the processes as a `tfdist.Mesh`, over an axis of which layers of `tfdist.layers` are split, such as
            `tfdist.layers.ColumnParallelDense`: each process keeps a part of such a layer's weights and of the
            optimizer's variables for them, and computes that part for the rows of all processes along the axis. The
            batch is divided over all processes, whatever the mesh. All processes call what saves or reads weights, as
            with ``shard="weights"``. For one device in each process, without compression and ``delay``.

    Raises:
        MismatchError: processes have different numbers or kinds of devices, algorithms or compression.
        TypeError: ``compression`` is not a method, a schedule or a policy; ``group`` is not a `tfdist.Group`; or
            ``mesh`` is not a `tfdist.Mesh`.
        ValueError: a device does not exist, or is named twice; there is no such algorithm; ``delay`` is not 0 or 1;
            ``shard`` is not None, ``"optimizer"`` or ``"weights"``; ``gather`` is not ``"layer"`` or ``"model"``, or is
            given without ``shard="weights"``; the mesh has another number of processes; or ``algorithm``, ``delay``,
            ``shard`` or ``mesh`` is given with what it does not work with, such as ``shard`` with a method of
            compression that encodes gradients as a whole.
        RuntimeError: TensorFlow already uses GPUs that other processes should get, or has run an operation before its
            collectives are set up; or the machine has TPUs and no GPU, and ``devices`` is not given.
        CalibrationError: `TFDIST_CALIBRATION` names a file that was made on another machine.
        ClusterSpecError: TF_CONFIG or the resolver does not describe a cluster that contains this task.
        RendezvousError: not all tasks entered the job, or this one was refused.
        MPIUnavailableError: no MPI library can be loaded.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
        algorithm: str = "auto",
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        check_weights: bool = True,
        sum_sparse_rows: bool = False,
        group: Group | None = None,
        cpu_relocation: bool = False,
        delay: int = 0,
        float32_sums: bool = False,
        shard: str | None = None,
        gather: str = "layer",
        mesh: Mesh | None = None,
    ) -> None:
        algorithms.check(algorithm, more=(_TENSORFLOW,))
        is_by_tensorflow = algorithm == _TENSORFLOW
        _check_parts(shard, gather, mesh)
        _check_together(shard, mesh, compression, delay, is_by_tensorflow)
        if not isinstance(delay, int) or delay not in (0, 1):
            raise ValueError(f"AllReduceStrategy(delay=…) must be 0 or 1 steps; got {delay!r}")
        policy.as_policy(compression, scatters=shard is not None)  # raises before waiting for other processes
        cluster = discovery.discover(cluster_resolver)
        timeouts = Timeouts.of(timeouts)
        if cluster is not None and cluster.task.job == "ps" and cluster.rank is None and cluster.number is not None:
            from tfdist.strategies.servers import beside_all_reduce

            beside_all_reduce.serve(cluster, timeouts)
            sys.exit()
        own_algorithm = algorithms.AUTO if is_by_tensorflow else algorithm
        engine_group, chosen = self._enter(cluster, cluster_resolver, devices, timeouts, own_algorithm, group)
        by_tensorflow = None
        if is_by_tensorflow and engine_group.size > 1:
            host = None if cluster is None else cluster.task.address.rpartition(":")[0]
            by_tensorflow = functools.partial(TensorFlowSums, engine_group, chosen[0], host)
        compressor = None
        if compression is not None:
            compressor = Compressor(compression, engine_group.rank, engine_group.size, scatters=shard is not None)
        tables = None
        if cluster is not None and cluster.is_elastic and cluster.rank is not None:
            from tfdist.strategies.servers import beside_all_reduce  # jobs without servers do not load this

            tables = beside_all_reduce.tables(cluster, engine_group, timeouts)
        home = "CPU:0" if cpu_relocation else None
        options = compressor, check_weights, not sum_sparse_rows, tables, home, float32_sums, by_tensorflow
        for name, is_given in (("delay=1", delay), (f"shard={shard!r}", shard), (f"mesh={mesh}", mesh)):
            if is_given and len(chosen) > 1:
                raise ValueError(f"AllReduceStrategy({name}) needs one device in each process; got {chosen}")
        made: Any = _SHARDED[shard] if shard else DelayedExtended if delay else AllReduceExtended
        if mesh is not None:
            made = functools.partial(MeshExtended, mesh, shard)
        if gather != "layer":
            made = functools.partial(made, gather=gather)
        super().__init__(made(self, engine_group, chosen, *options))

    def settle(self, model: keras.Model) -> None:
        """Makes the last update of a model, if ``delay`` is 1; otherwise does nothing. All processes call this.

        Custom training loops call this before they save or evaluate; `fit`, `evaluate` and `predict` do so themselves.

        Args:
            model: a Keras model that was made in the scope of this strategy.
        """
        if isinstance(self.extended, DelaysUpdates):
            keras_delayed.settle(model, self.extended)


_TENSORFLOW = "tensorflow"
"""Name of the algorithm that is TensorFlow's, and not the engine's."""
_SHARDED = {"optimizer": ShardedExtended, "weights": WeightPartsExtended}
"""Classes by the argument ``shard``."""


def _check_parts(shard: str | None, gather: str, mesh: Mesh | None) -> None:
    if shard is not None and shard not in _SHARDED:
        raise ValueError(f"AllReduceStrategy(shard=…) must be None, 'optimizer' or 'weights'; got {shard!r}")
    if gather not in ("layer", "model"):
        raise ValueError(f"AllReduceStrategy(gather=…) must be 'layer' or 'model'; got {gather!r}")
    if gather == "model" and shard != "weights":
        raise ValueError(f"AllReduceStrategy(gather='model') needs shard='weights'; got shard={shard!r}")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"AllReduceStrategy(mesh=…) must be a tfdist.Mesh, such as Mesh(data=2, model=2); got {mesh!r}")


def _check_together(
    shard: str | None, mesh: Mesh | None, compression: object, delay: int, is_by_tensorflow: bool
) -> None:
    divides = f"shard={shard!r}" if shard else f"mesh={mesh}" if mesh else None
    late = "delay=1" if delay else None
    for one, other in (
        (f"mesh={mesh}" if mesh else None, "compression=" if compression is not None else None),
        (divides, late),
        (divides or late, "algorithm='tensorflow'" if is_by_tensorflow else None),
    ):
        if one and other:
            raise ValueError(f"AllReduceStrategy: {one} does not work with {other}; leave out one of the two")
