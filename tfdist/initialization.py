"""This process in its job: `tfdist.init`, and what a process knows afterwards, such as its rank."""

from __future__ import annotations

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.collectives import algorithms  # noqa: E402
from tfdist.collectives.cost import TYPICAL, Calibration  # noqa: E402
from tfdist.engine import calibration  # noqa: E402
from tfdist.engine.bridge import Bridge  # noqa: E402
from tfdist.engine.edges import Edges  # noqa: E402
from tfdist.engine.exchange import Exchange  # noqa: E402
from tfdist.engine.group import ProcessGroup  # noqa: E402
from tfdist.engine.slices import Slices  # noqa: E402
from tfdist.errors import MismatchError  # noqa: E402
from tfdist.runtime import job, world  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.runtime.world import World  # noqa: E402
from tfdist.strategies import keras_unsynchronized  # noqa: E402
from tfdist.strategies.devices import devices  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402


class Collectives:
    """The collectives of one group.

    Args:
        group: the processes that take part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.bridge, self.slices = Bridge(group), Slices(group)
        self.exchange, self.edges = Exchange(group), Edges(group)


def _agreed(entered: World, algorithm: str) -> Calibration:
    """Checks that all ranks chose the same algorithm; returns rank 0's calibration. Uses the rendezvous only."""
    written = calibration.written(entered.group) if entered.rank == 0 and algorithm == algorithms.AUTO else None
    everyone = entered.all_gather("the arguments of tfdist.init", [algorithm, written])
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise MismatchError(
                f"ranks differ in the arguments of tfdist.init: rank 0 has algorithm {everyone[0][0]}, rank {rank} has "
                f"algorithm {theirs}. Pass the same algorithm on every rank."
            )
    text = everyone[0][1]
    return TYPICAL if text is None else calibration.read(text)


class Context:
    """The state that `init` sets up.

    Args:
        entered: the job's processes.
        algorithm: the all-reduce algorithm, the same on all processes.

    Attributes:
        world: the job's processes.
    """

    def __init__(self, entered: World, algorithm: str) -> None:
        self.world = entered
        self._calibration = _agreed(entered, algorithm)
        self._group = entered.group.using(algorithm, self._calibration) if entered.rank >= 0 else None
        self._made: dict[tuple[int, ...], Collectives] = {}

    @property
    def group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group or self.world.group  # the second raises an error, as this process has no rank

    def among(self, group: Group | None) -> Collectives:
        """Returns the collectives of a group; of all processes by default."""
        members = self.group.members if group is None else _members(group)
        if members not in self._made:
            self._made[members] = Collectives(self.group.subgroup(members))
        return self._made[members]

    def processes(self, group: Group | None, algorithm: str | None) -> ProcessGroup:
        """Returns the engine's group of some processes; see `engine_group`."""
        chosen = self.group if group is None else self.group.subgroup(_members(group))
        return chosen if algorithm is None else chosen.using(algorithm, self._calibration)


def _members(group: Group) -> tuple[int, ...]:
    if not isinstance(group, Group):
        raise TypeError(f"group= must be a tfdist.Group, such as tfdist.Group([0, 1]); got {group!r}")
    return group.members()


_initialized: Context | None = None


def init(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
    timeouts: Timeouts | None = None,
    algorithm: str = "auto",
) -> None:
    """Enters the job that this process was started in. A second call does nothing.

    Training tasks wait for each other and start MPI. Parameter servers and evaluators enter without MPI; their `rank`
    is -1, and their deaths do not end the job.

    Call it first, and assign each process its GPU by `local_rank` before TensorFlow uses one:
    ``tf.config.set_visible_devices(gpus[tfdist.local_rank()], "GPU")``.

    Args:
        cluster_resolver: description of the cluster; by default it comes from an MPI launcher, else from TF_CONFIG,
            else from Slurm. Without any of them the process is alone, with size 1.
        timeouts: the deadlines for waits for other processes.
        algorithm: the algorithm of `all_reduce`; see `tfdist.AllReduceStrategy`.

    Raises:
        TfdistError: the others did not enter the job, this process was refused, or no MPI library can be used.
    """
    global _initialized
    algorithms.check(algorithm)
    if _initialized is None:
        entered = world.enter(discovery.discover(cluster_resolver), Timeouts.of(timeouts))
        if entered.rank >= 0:
            devices.share_memory(entered.local_size)
        _initialized = Context(entered, algorithm)
        if entered.rank >= 0 and entered.size > 1:
            keras_unsynchronized.warn_in_fit()


def is_initialized() -> bool:
    """Returns whether `init` has been called."""
    return _initialized is not None


def rank() -> int:
    """Returns this process's rank, from 0; -1 in a parameter server or an evaluator, which run no collectives."""
    return context().world.rank


def size() -> int:
    """Returns the number of processes that train together."""
    return context().world.size


def role() -> str:
    """Returns this process's role in the job: ``"chief"`` (rank 0), ``"worker"``, ``"ps"`` or ``"evaluator"``.

    The role is known after `init`, or after a strategy has been made.
    """
    member = job.current()
    if _initialized is not None:
        return _initialized.world.role
    if member is not None and member.cluster is not None:
        return "chief" if member.control.task == 0 else member.cluster.task.job
    if not keras_seams.is_installed():
        raise RuntimeError("call tfdist.init() first, or make a strategy")
    cluster = discovery.discover(None)  # the strategy trains alone, perhaps on an evaluator
    return "evaluator" if cluster is not None and cluster.task.job == "evaluator" else world.current().role


def local_rank() -> int:
    """Returns this process's rank among the processes on its machine."""
    return context().world.local_rank


def local_size() -> int:
    """Returns the number of processes on this machine."""
    return context().world.local_size


def engine_group(group: Group | None = None, algorithm: str | None = None) -> ProcessGroup:
    """Returns the engine's group of some processes, for code that is built on collectives; not for users.

    Args:
        group: the processes; all by default.
        algorithm: the all-reduce algorithm; by default that of `init`.

    Raises:
        RuntimeError: `init` has not been called.
        ValueError: there is no such algorithm, or it is not for groups.
    """
    return context().processes(group, algorithm)


def context() -> Context:
    """Returns the state that `init` has set up.

    Raises:
        RuntimeError: `init` has not been called.
    """
    if _initialized is None:
        raise RuntimeError(
            "call tfdist.init() first, after the imports and on every process: functions such as tfdist.all_gather "
            "need it, also where a strategy has been made"
        )
    return _initialized
