"""`PipelineStrategy`: the stages of a model on several processes or devices, working at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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
from tfdist.pipeline import cuts as model_cuts  # noqa: E402
from tfdist.pipeline import keras_pipelines, schedules  # noqa: E402
from tfdist.pipeline.actions import Action, ActionKind  # noqa: E402
from tfdist.pipeline.dry_run import PipelineTimeline, dry_run  # noqa: E402
from tfdist.pipeline.extended import PipelineExtended  # noqa: E402
from tfdist.pipeline.mesh import STAGE, PipelineMesh, side_by_side  # noqa: E402
from tfdist.pipeline.table import Edge, Table  # noqa: E402
from tfdist.runtime import world  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.runtime.mesh import Mesh  # noqa: E402
from tfdist.strategies.devices import device_names  # noqa: E402
from tfdist.strategies.devices.devices import own_devices  # noqa: E402
from tfdist.strategies.divided import described_variables  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
_SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
    "interleaved": schedules.interleaved,
    "zero_bubble": schedules.zero_bubble,
}


class PipelineStrategy(tf.distribute.Strategy):
    """Trains a model whose stages are on several processes, or on several devices of one process.

    A batch is divided into micro-batches, on which the stages work at the same time: forward passes send activations to
    later stages, backward passes send gradients back. A process holds the weights of its own stages and the optimizer's
    variables for them, so that a model may be larger than the memory of one process.

    With ``data=d`` there are d pipelines side by side, each with its part of every batch; an all-reduce sums their
    gradients. Call ``fit``, ``evaluate``, ``predict``, ``save`` and the like on every process, with the same data in
    the same order; logs, metrics and predictions are equal on all. The results are those of the whole model in one
    process: see ``docs/pipelines.md`` for the few exceptions.

    Example:
        >>> strategy = tfdist.PipelineStrategy(stages=2, micro_batches=8)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((784,)), *hidden_layers, keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=256)  # under `tfdist run -n 2`

    Args:
        cluster_resolver: describes the cluster; by default the cluster is found as in `AllReduceStrategy`.
        stages: number of stages.
        micro_batches: number of micro-batches of each batch. Full batches of ``fit``, of ``batch_size`` samples, must
            be divisible into equal ones; smaller batches are divided as equally as possible.
        schedule: ``"gpipe"``: all forward passes before all backward passes. ``"1f1b"``: takes as long, and keeps the
            activations of at most as many micro-batches as there are stages. ``"interleaved"``: 1F1B with several
            stages on each process, which waits less and sends more. ``"zero_bubble"`` (ZB-H1): computes gradients of
            weights while it would wait. Or a `Table` of your own, for one model, or a function that makes a table from
            the edges between stages.
        data: number of pipelines side by side, among which the processes are divided. A pipeline has ``stages``
            processes; or with ``"interleaved"`` a divisor of ``stages``; or one process, which then has all stages.
        cuts: where the model is divided: ``"flops"`` or ``"memory"`` balances this cost of the calls of layers; or the
            names of the calls that begin all stages but the first; or a result of `tfdist.partition`.
        recompute: whether a stage keeps only its inputs for the backward pass, and computes its activations again.
        devices: this process's devices: one if the stages are on several processes, else any number, dealt out to the
            stages. By default the machine's GPUs, divided among its processes, or the CPU.
        timeouts: how long to wait for other tasks; a `tfdist.Timeouts`.
        algorithm: the all-reduce algorithm; see `AllReduceStrategy`.
        compression: how gradients are compressed that pipelines sum; see `AllReduceStrategy`.
        check_weights: whether `fit` compares the weights of all pipelines after each epoch.
        sum_sparse_rows: whether the rows of sparse gradients are summed where that sends fewer bytes than gathering
            them.
        group: the processes that train this model together, including this one; by default all of the job.
        record: whether the times of training steps are recorded; see `recorded`.
        mesh: the processes as a `tfdist.Mesh`, in place of ``data``: pipelines are along its axis ``"stage"``, and side
            by side along its others, over which layers of `tfdist.layers` are split; see ``docs/split_layers.md``.

    Raises:
        DeadlockError: the workers of a table of your own would wait for each other.
        TypeError: an argument has the wrong type.
        ValueError: the processes do not fit the stages, or an argument is invalid.
        TfdistError: the job cannot be entered, or processes have different settings; see `AllReduceStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        stages: int,
        micro_batches: int,
        schedule: ScheduleName | Table | Callable[[Sequence[Edge]], Table] = "1f1b",
        data: int = 1,
        cuts: model_cuts.Cuts = "flops",
        recompute: bool = False,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
        algorithm: str = "auto",
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        check_weights: bool = True,
        sum_sparse_rows: bool = False,
        group: Group | None = None,
        record: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        _check_mesh(mesh, data, compression)
        for name, value in (("stages", stages), ("micro_batches", micro_batches), ("data", data)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"PipelineStrategy({name}=…) must be an integer of at least 1; got {value!r}")
        algorithms.check(algorithm)
        policy.as_policy(compression)  # raises its errors before waiting for other processes
        model_cuts.check(cuts, stages)
        cluster = discovery.discover(cluster_resolver)
        if devices is not None:
            devices = device_names.all_resolved("PipelineStrategy(devices=…)", devices)
        entered = world.train(cluster, Timeouts.of(timeouts))
        keras_seams.install_for(self)
        keras_pipelines.install()
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        training_group = entered.group if group is None else entered.group.subgroup(group.members())
        processes = PipelineMesh(
            training_group.using(algorithm, calibration.agreed(training_group, algorithm)),
            side_by_side(training_group.size, data) if mesh is None else mesh,
        )
        chosen = own_devices(devices, entered.local_rank, entered.local_size)
        if processes.workers > 1 and len(chosen) > 1:
            if devices is not None:
                raise ValueError(
                    f"PipelineStrategy(devices=…) must name one device, as the stages are on {processes.workers} "
                    f"processes; got {list(devices)}"
                )
            chosen = chosen[:1]
        workers = _number_of_workers(schedule, stages, processes, mesh, len(chosen))
        part = "" if processes.workers == 1 else f"worker-{processes.worker}-"
        self._table = _table_of(schedule, stages, micro_batches, workers)
        self._dry_run = dry_run(self._table(_chain(stages)), _cost)  # raises DeadlockError before anything starts
        super().__init__(
            PipelineExtended(
                self,
                processes,
                chosen[0],
                [chosen[worker % len(chosen)] for worker in range(workers)] if processes.workers == 1 else None,
                stages,
                micro_batches,
                cuts,
                self._table,
                recompute,
                None if compression is None else Compressor(compression, processes.replica, processes.data, part=part),
                check_weights,
                not sum_sparse_rows,
                record,
                mesh is not None,
            )
        )

    @contextlib.contextmanager
    def _describing_scope(self) -> Iterator[Any]:
        with super().scope() as strategy, described_variables.describing():
            yield strategy

    def scope(self) -> Any:
        """Returns the context to make models in. Variables get memory later, on the processes that hold them."""
        return self._describing_scope()

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver of the cluster; see `AllReduceStrategy`."""
        return self._cluster_resolver

    @property
    def rank(self) -> int:
        """This process's rank among all processes; the chief's is 0."""
        return self.extended.mesh.all_processes.rank

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        return self.extended.mesh.all_processes.size

    @property
    def worker(self) -> int:
        """This process's number in its pipeline; that of its stage if each process has one stage."""
        return self.extended.mesh.worker

    @property
    def schedule(self) -> PipelineTimeline:
        """The timeline of a step in which a backward pass takes twice as long as a forward pass; printed as a picture.

        The timeline is for stages that follow each other; connections over several stages may make them wait for more.
        """
        return self._dry_run

    def recorded(self, step: int = -1) -> PipelineTimeline:
        """Returns the timeline of one of the last training steps, in seconds; printed as a picture.

        Compare it with `schedule`. It needs ``record=True``. All processes call it, and get the same timeline.

        Args:
            step: index among the steps that are kept; the last one by default.

        Raises:
            ValueError: there is no such step, or times are not recorded.
        """
        if self.extended.recording is None:
            raise ValueError("PipelineStrategy.recorded() needs PipelineStrategy(…, record=True)")
        return self.extended.recording.timeline(step)


def _check_mesh(mesh: Any, data: int, compression: object) -> None:
    """Checks the arguments that a mesh replaces or excludes.

    Raises:
        TypeError: the mesh is of another type.
        ValueError: a mesh is given with what it does not work with.
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"PipelineStrategy(mesh=…) must be a tfdist.Mesh, such as Mesh({STAGE}=2, model=2); got {mesh!r}"
        )
    if data != 1:
        raise ValueError(
            f"PipelineStrategy(mesh={mesh}) has its pipelines side by side along the axes other than {STAGE!r}: give "
            f"their number as an axis, such as Mesh({STAGE}=…, data={data}), and not as data={data}"
        )
    if compression is not None:
        raise ValueError(f"PipelineStrategy: mesh={mesh} does not work with compression=")


def _chain(stages: int) -> list[Edge]:
    return [(stage, stage + 1) for stage in range(stages - 1)]


def _cost(action: Action) -> float:
    """Returns the cost of an action: a backward pass computes gradients of inputs and of weights, each for 1."""
    return 2.0 if action.kind is ActionKind.BACKWARD else 1.0


def _number_of_workers(schedule: Any, stages: int, mesh: PipelineMesh, given: Mesh | None, devices: int) -> int:
    """Returns the number of workers, each with a row of the table.

    Raises:
        ValueError: the number of processes does not fit the schedule.
    """
    if mesh.workers == 1:
        if isinstance(schedule, Table):
            return len(schedule.rows)
        return devices if schedule == "interleaved" else stages
    if isinstance(schedule, Table):
        expected, fits = f"{len(schedule.rows)} workers of the table", mesh.workers == len(schedule.rows)
    elif schedule == "interleaved":
        expected, fits = f"stages={stages} dealt out evenly", stages % mesh.workers == 0
    elif callable(schedule):
        expected, fits = "", True
    else:
        expected, fits = f"stages={stages}, one on each", mesh.workers == stages
    if not fits:
        made = f"make pipelines of {mesh.workers} process(es), which does not fit {expected}"
        size, data = mesh.all_processes.size, mesh.data
        if given is not None:
            raise ValueError(
                f"PipelineStrategy: {size} process(es) with mesh={given} {made}. Change the mesh's axis {STAGE!r} or "
                "stages=; or leave that axis out: each process then has all stages"
            )
        raise ValueError(
            f"PipelineStrategy: {size} process(es) with data={data} {made}. Start stages × data = {stages * data} "
            "processes, or change stages= or data=; or start one process, which then has all stages; "
            'schedule="interleaved" takes several stages on each process.'
        )
    return mesh.workers


def _table_of(schedule: Any, stages: int, micro_batches: int, workers: int) -> Callable[[Sequence[Edge]], Table]:
    """Returns a function that makes a table from the edges between stages.

    Raises:
        TypeError: the schedule is not a name, a table or a function.
        ValueError: the name is unknown, or the table is for other numbers of stages or micro-batches.
    """
    if isinstance(schedule, Table):
        if (schedule.stages, schedule.micro_batches) != (stages, micro_batches):
            raise ValueError(
                f"PipelineStrategy(stages={stages}, micro_batches={micro_batches}): the table of schedule= is for "
                f"{schedule.stages} stages and {schedule.micro_batches} micro-batches"
            )
        return lambda edges: Table(schedule.rows, stages, micro_batches, edges)
    if schedule == "interleaved":
        return lambda edges: schedules.interleaved(stages, micro_batches, workers, edges)
    if isinstance(schedule, str) and schedule in _SCHEDULES:
        return lambda edges: _SCHEDULES[schedule](stages, micro_batches, edges)
    if callable(schedule):
        return schedule
    names = ", ".join(f'"{name}"' for name in _SCHEDULES)
    error = ValueError if isinstance(schedule, str) else TypeError
    raise error(
        f"PipelineStrategy(schedule=…) must be {names}, a Table, or a function that makes one; got {schedule!r}"
    )
