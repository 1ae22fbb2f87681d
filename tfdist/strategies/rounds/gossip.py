"""`GossipStrategy`: processes train on their own and average their weights with a few neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.strategies import require_tensorflow

require_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.compression import Method, differences, policy  # noqa: E402
from tfdist.compression.policy import FewerWorkers, Policy, Schedule  # noqa: E402
from tfdist.engine.group import ProcessGroup  # noqa: E402
from tfdist.gossip.bounded import BoundedStalenessMixing  # noqa: E402
from tfdist.gossip.course import Gossiping  # noqa: E402
from tfdist.gossip.encodings import Differences, Plain  # noqa: E402
from tfdist.gossip.lines import MessageChannels  # noqa: E402
from tfdist.gossip.mixing import Mixing  # noqa: E402
from tfdist.gossip.pairs import PairwiseMixing  # noqa: E402
from tfdist.gossip.rounds import SynchronousMixing  # noqa: E402
from tfdist.gossip.topologies import Topology, as_topology  # noqa: E402
from tfdist.local_sgd.course import VariableGroup  # noqa: E402
from tfdist.local_sgd.intervals import Every, Interval  # noqa: E402
from tfdist.parameter_server.options.synchronization import (  # noqa: E402
    Asynchronous,
    BoundedStaleness,
    Synchronization,
    Synchronous,
)
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.strategies.rounds.processes_in_rounds import ProcessesInRounds  # noqa: E402
from tfdist.strategies.rounds.rounds_extended import RoundsExtended  # noqa: E402

_HERE = "GossipStrategy"


class GossipStrategy(ProcessesInRounds):
    """Data-parallel training without all-reduce in its steps: a process averages its weights with a few neighbours.

    After its step a process sends its weights to its neighbours in a topology, and goes on with the weighted mean of
    theirs and its own. A round costs as many messages as a process has neighbours, however many processes there are,
    and a slow process or network link delays its neighbours only. The processes' weights differ slightly; `distance`
    and `tfdist.callbacks.Communication` report by how much. At the end of an epoch all processes take the mean of all
    weights, so that `fit` validates, calls callbacks and returns with equal weights.

    - By default all processes make their rounds together, and wait for their neighbours: D-PSGD. With ``overlap=True``
      weights are sent during the next step.
    - ``synchronization=tfdist.parameter_server.BoundedStaleness(4)`` mixes with the newest weights that have
      arrived, and waits for a neighbour only if it is more than 4 rounds behind.
    - ``synchronization=tfdist.parameter_server.Asynchronous()`` averages in pairs, when both processes get to it:
      AD-PSGD. No process waits for another one.
    - ``compression=tfdist.compression.TopK(0.01)`` sends the compressed differences between the weights and those that
      the neighbours have: CHOCO-SGD.

    Data, metrics and the progress bar work as under `tfdist.LocalSGDStrategy`. A process that has no more data leaves
    the rounds until the end of the epoch, and its neighbours go on without it. Each process keeps its own optimizer
    slots.

    Example:
        >>> strategy = tfdist.GossipStrategy(topology="exponential")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> model.fit(x, y, batch_size=256)

    Args:
        cluster_resolver: description of the cluster; see `tfdist.AllReduceStrategy`.
        topology: which processes average with each other: ``"ring"``; ``"exponential"``, with one other process in each
            round, in turn 1, 2, 4, … places away; ``"random"``, in pairs that are drawn anew in each round;
            ``"complete"``, all; a topology of `tfdist.gossip`; or a graph, as `tfdist.gossip.Graph` takes it.
        sync_every: number of steps between rounds, or an interval of `tfdist.local_sgd`.
        synchronization: which processes wait for each other, as above; by default
            `tfdist.parameter_server.Synchronous`. A bound needs a topology that is the same in all rounds.
        overlap: whether the weights of a round are used only after the next step; needs `Synchronous`.
        compression: how differences are compressed, as in `tfdist.AllReduceStrategy`, but not by methods that need the
            sum of all processes. Needs `Synchronous` and a topology that is the same in all rounds.
        consensus_rate: fraction of the differences to its neighbours' compressed weights by which a process moves,
            above 0 and at most 1; by default one that suits the method (`tfdist.gossip.encodings.suitable_rate`).
        devices: this process's devices, which take each step together; see `tfdist.AllReduceStrategy`.
        timeouts: how long to wait for other tasks; a `tfdist.Timeouts`.
        check_weights: whether `fit` compares the weights of all processes after each epoch.
        group: the processes that train this model together; by default all of the job.

    Raises:
        MismatchError: processes have different arguments.
        TypeError: ``synchronization``, ``overlap`` or ``compression`` has the wrong type.
        ValueError: an argument is out of its range, or two of them exclude each other; the topology is not connected,
            or is for another number of processes.
        ClusterSpecError: TF_CONFIG or the resolver does not describe a cluster that contains this task.
        RendezvousError: not all tasks entered the job, or this one was refused.
        MPIUnavailableError: no MPI library can be loaded.

    References:
        Lian et al., *Can decentralized algorithms outperform centralized algorithms?*, NeurIPS 2017, and *Asynchronous
        decentralized parallel stochastic gradient descent*, ICML 2018. Koloskova, Lin, Stich and Jaggi, *Decentralized
        deep learning with arbitrary communication compression*, ICLR 2020.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        topology: Any = "ring",
        sync_every: int | Interval = 1,
        synchronization: Synchronization | None = None,
        overlap: bool = False,
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        consensus_rate: float | None = None,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
        check_weights: bool = True,
        group: Group | None = None,
    ) -> None:
        interval = sync_every if isinstance(sync_every, Interval) else Every(sync_every)
        lines = as_topology(topology)
        synchronization = Synchronous() if synchronization is None else synchronization
        chosen_policy = None if compression is None else policy.as_policy(compression)
        _check(lines, synchronization, overlap, compression is not None, consensus_rate)
        differences.check(compression, "gossip")
        cluster = discovery.discover(cluster_resolver)
        timeouts = Timeouts.of(timeouts)
        engine_group, chosen = self._enter(cluster, cluster_resolver, devices, timeouts, "auto", group)
        lines.check(engine_group.size)

        def mixing(trained: VariableGroup) -> Mixing:
            return _mixing(engine_group, trained, lines, synchronization, overlap, chosen_policy, consensus_rate)

        described = (
            f"topology={lines}, sync_every={interval}, synchronization={synchronization}, overlap={overlap}, "
            f"compression={chosen_policy}, consensus_rate={consensus_rate}"
        )
        courses = Gossiping(engine_group, interval, mixing, described)
        super().__init__(RoundsExtended(self, engine_group, chosen, courses, check_weights))

    def distance(self, model: keras.Model) -> float | None:
        """Returns how far apart the processes' weights of a model were before they were last made equal.

        Args:
            model: a Keras model that was made in the scope of this strategy.

        Returns:
            The root of the mean squared distance from their mean, divided by the length of the mean; None if there was
            no round yet.
        """
        return self.extended.distance(model)


def _mixing(
    group: ProcessGroup,
    trained: VariableGroup,
    topology: Topology,
    synchronization: Synchronization,
    overlap: bool,
    chosen: Policy | None,
    rate: float | None,
) -> Mixing:
    lines = MessageChannels(group, trained.name)
    if isinstance(synchronization, Asynchronous):
        return PairwiseMixing(lines, topology, group.rank, group.size)
    if isinstance(synchronization, BoundedStaleness):
        return BoundedStalenessMixing(lines, topology, group.rank, group.size, synchronization.steps)
    if chosen is None:
        return SynchronousMixing(lines, topology, Plain(), group.rank, group.size, overlap)
    schedules = [
        policy.chosen(chosen, *pair) for pair in zip(trained.paths, map(np.shape, trained.centre), strict=True)
    ]
    return SynchronousMixing(lines, topology, Differences(schedules, rate, group.rank), group.rank, group.size, overlap)


def _check(
    topology: Topology, synchronization: object, overlap: object, compresses: bool, consensus_rate: float | None
) -> None:
    if not isinstance(synchronization, Synchronization):
        raise TypeError(
            f"{_HERE}(synchronization=…) must be Synchronous(), BoundedStaleness(…) or Asynchronous() of "
            f"tfdist.parameter_server; got {synchronization!r}"
        )
    if type(synchronization) not in (Synchronous, BoundedStaleness, Asynchronous) or (
        isinstance(synchronization, Synchronous) and synchronization.backup_workers
    ):
        raise ValueError(f"{_HERE} has no server, which {synchronization!r} needs: choose another synchronization=")
    waits = isinstance(synchronization, Synchronous)
    if not isinstance(overlap, bool):
        raise TypeError(f"{_HERE}(overlap=…) must be True or False; got {overlap!r}")
    if overlap and not waits:
        raise ValueError(f"{_HERE}: overlap=True is for Synchronous(); got {synchronization!r}, which overlaps anyway")
    if compresses and not waits:
        raise ValueError(
            f"{_HERE}: compression= needs Synchronous(), as all neighbours must receive the compressed differences of "
            f"each round; got {synchronization!r}"
        )
    if (compresses or isinstance(synchronization, BoundedStaleness)) and not topology.is_static:
        what = "compression=" if compresses else "BoundedStaleness"
        raise ValueError(
            f"{_HERE}: {what} needs neighbours that are the same in all rounds, such as 'ring'; got {topology}"
        )
    if consensus_rate is not None and not compresses:
        raise ValueError(f"{_HERE}: consensus_rate= needs compression=, which is None")
    if consensus_rate is not None and (not _is_number(consensus_rate) or not 0 < consensus_rate <= 1):
        raise ValueError(f"{_HERE}(consensus_rate=…) must be above 0 and at most 1; got {consensus_rate!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
