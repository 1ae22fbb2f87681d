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
from tfdist.pipeline import described_variables, keras_pipelines, schedules  # noqa: E402
from tfdist.pipeline.actions import Action, Kind  # noqa: E402
from tfdist.pipeline.dry_run import Timeline, dry_run  # noqa: E402
from tfdist.pipeline.extended import PipelineExtended  # noqa: E402
from tfdist.pipeline.mesh import Mesh  # noqa: E402
from tfdist.pipeline.table import Edge, Table  # noqa: E402
from tfdist.runtime import world  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.strategies.devices import device_names  # noqa: E402
from tfdist.strategies.devices.devices import own_devices  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
_SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_forward_one_backward,
    "interleaved": schedules.interleaved,
    "zero_bubble": schedules.zero_bubble,
}


class PipelineStrategy(tf.distribute.Strategy):
    """Training of a model whose stages are on several processes, or on several devices of one.

    A batch is divided into micro-batches. While one stage works on a micro-batch, the others work on others: forward
    passes hand activations on to later stages, backward passes hand gradients back. A process holds the weights of its
    own stages and what the optimizer keeps for them, so that a model may be larger than the memory of one.

    With ``data=d`` there are d pipelines beside each other, each with its part of every batch, whose gradients are
    summed by all-reduce. ``fit``, ``evaluate``, ``predict``, ``save`` and the like are called on every process, with
    the same data in the same order; logs, metrics and predictions are equal on all. What they compute is what the whole
    model would compute: see ``docs/pipelines.md`` for the few exceptions.

    Example:
        >>> strategy = tfdist.PipelineStrategy(stages=2, micro_batches=8)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((784,)), *hidden_layers, keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=256)  # under `tfdist run -n 2`

    Args:
        cluster_resolver: as of `AllReduceStrategy`.
        stages: number of stages.
        micro_batches: number of micro-batches of each batch. They divide full batches, those of ``fit`` that are as
            large as ``batch_size``; of others they have as equal parts as can be.
        schedule: ``"gpipe"``, all forward passes before all backward passes; ``"1f1b"``, which takes as long and keeps
            the activations of as many micro-batches at most as there are stages; ``"interleaved"``, 1F1B with several
            stages on each process, which waits less and sends more; ``"zero_bubble"`` (ZB-H1), which computes the
            gradients of weights while it would wait. Or a `Table` of your own, for one model; or a function that makes
            one, of the edges between stages.
        data: number of pipelines beside each other. The processes divided by it are the processes of each, which is
            ``stages``, except with ``"interleaved"``, where it divides them, or one, which then has all stages.
        cuts: where the model is divided: ``"flops"`` or ``"memory"``, by what each call of a layer takes; the names of
            the calls that stages but the first begin with; or what `tfdist.partition` has returned.
        recompute: whether a stage keeps only its inputs for the backward pass, and computes its activations again.
        devices: of this process: one if the stages are on several processes, else any number, dealt out to the stages.
            By default the machine's GPUs, divided among its processes, or the CPU.
        timeouts: as of `AllReduceStrategy`.
        algorithm: of all-reduces, as of `AllReduceStrategy`.
        compression: of gradients that pipelines sum, as of `AllReduceStrategy`.
        check_weights: as of `AllReduceStrategy`, between pipelines.
        sum_sparse_rows: as of `AllReduceStrategy`.
        group: as of `AllReduceStrategy`.
        record: whether the times of training steps are recorded; see `recorded`.

    Raises:
        DeadlockError: the workers of a table of your own would wait for each other.
        TypeError: an argument has another type.
        ValueError: the processes do not fit the stages, or an argument is none.
        TfdistError: as `AllReduceStrategy`.
    """

    # Read by MirroredExtended; used only among this process's devices.
    _collective_key_base = 0

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
    ) -> None:
        for name, value in (("stages", stages), ("micro_batches", micro_batches), ("data", data)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"PipelineStrategy({name}=…) is a number from 1; got {value!r}")
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
        own = entered.group if group is None else entered.group.subgroup(group.members())
        mesh = Mesh(own.using(algorithm, calibration.agreed(own, algorithm)), data)
        chosen = own_devices(devices, entered.local_rank, entered.local_size)
        if mesh.workers > 1 and len(chosen) > 1:
            if devices is not None:
                raise ValueError(
                    f"PipelineStrategy(devices=…): the stages are on {mesh.workers} processes, each with one device; "
                    f"got {list(devices)}"
                )
            chosen = chosen[:1]
        workers = _number_of_workers(schedule, stages, mesh, len(chosen))
        part = "" if mesh.workers == 1 else f"worker-{mesh.worker}-"
        self._table = _table_of(schedule, stages, micro_batches, workers)
        self._dry_run = dry_run(self._table(_chain(stages)), _cost)  # raises DeadlockError before anything starts
        super().__init__(
            PipelineExtended(
                self,
                mesh,
                chosen[0],
                [chosen[worker % len(chosen)] for worker in range(workers)] if mesh.workers == 1 else None,
                stages,
                micro_batches,
                cuts,
                self._table,
                recompute,
                None if compression is None else Compressor(compression, mesh.replica, mesh.data, part=part),
                check_weights,
                not sum_sparse_rows,
                record,
            )
        )

    @contextlib.contextmanager
    def _describing_scope(self) -> Iterator[Any]:
        with super().scope() as strategy, described_variables.describing():
            yield strategy

    def scope(self) -> Any:
        """Context in which models are made. Their variables get memory later, on the processes that hold them."""
        return self._describing_scope()

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """As of `AllReduceStrategy`."""
        return self._cluster_resolver

    @property
    def rank(self) -> int:
        """This process's rank among all; the chief's is 0."""
        return self.extended.mesh.everyone.rank

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        return self.extended.mesh.everyone.size

    @property
    def worker(self) -> int:
        """This process's place in its pipeline, which is the number of its stage if each has one."""
        return self.extended.mesh.worker

    @property
    def schedule(self) -> Timeline:
        """What a step does when, if a backward pass takes twice as long as a forward pass; printed as a picture.

        For a model whose stages follow each other; connections over several stages may make them wait for more.
        """
        return self._dry_run

    def recorded(self, step: int = -1) -> Timeline:
        """What the workers did when in one of the last training steps, in seconds; printed as a picture.

        To compare with `schedule`. It needs ``record=True``. All processes call it, and get the same.

        Args:
            step: which of the steps that are kept, as an index; the last one by default.

        Raises:
            ValueError: there is no such step, or nothing is recorded.
        """
        if self.extended.recording is None:
            raise ValueError("PipelineStrategy.recorded() needs PipelineStrategy(…, record=True)")
        return self.extended.recording.timeline(step)


def _chain(stages: int) -> list[Edge]:
    return [(stage, stage + 1) for stage in range(stages - 1)]


def _cost(action: Action) -> float:
    """A backward pass has gradients of inputs and of weights, each of which takes about what a forward pass does."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


def _number_of_workers(schedule: Any, stages: int, mesh: Mesh, devices: int) -> int:
    """The number of a table's rows.

    Raises:
        ValueError: the processes do not fit.
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
        size, data = mesh.everyone.size, mesh.data
        raise ValueError(
            f"PipelineStrategy: {size} process(es) with data={data} make pipelines of {mesh.workers}, which does not "
            f"fit {expected}. Start stages × data = {stages * data} processes, or change stages= or data=; or start "
            'one process, which then has all stages; schedule="interleaved" takes several stages on each process.'
        )
    return mesh.workers


def _table_of(schedule: Any, stages: int, micro_batches: int, workers: int) -> Callable[[Sequence[Edge]], Table]:
    """A function of the edges between stages.

    Raises:
        TypeError: the schedule is none.
        ValueError: a table is for other numbers.
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
    raise error(f"PipelineStrategy(schedule=…) is {names}, a Table, or a function that makes one; got {schedule!r}")
