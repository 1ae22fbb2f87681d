"""`QuorumStrategy`: processes that may join and leave train on their own, and average their changes in rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfdist.strategies import require_tensorflow

require_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery, launcher  # noqa: E402
from tfdist.cluster.settings import Timeouts, read_secret  # noqa: E402
from tfdist.cluster.spec import Cluster  # noqa: E402
from tfdist.compression import Method, differences, policy  # noqa: E402
from tfdist.compression.policy import FewerWorkers, Policy, Schedule  # noqa: E402
from tfdist.errors import ClusterSpecError  # noqa: E402
from tfdist.local_sgd.intervals import Every, Interval  # noqa: E402
from tfdist.local_sgd.rules import Averaging, Rule  # noqa: E402
from tfdist.parameter_server.protocol.curve import Keys  # noqa: E402
from tfdist.quorum.contributions import STRATEGY  # noqa: E402
from tfdist.quorum.course import QuorumRoundsFactory  # noqa: E402
from tfdist.quorum.links import Links  # noqa: E402
from tfdist.quorum.members import ClusterMembers, Members, SingleProcessMembers  # noqa: E402
from tfdist.runtime import job, world  # noqa: E402
from tfdist.strategies.devices import device_names  # noqa: E402
from tfdist.strategies.devices.devices import own_devices, place_on_host  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402
from tfdist.strategies.rounds.quorum_extended import QuorumExtended  # noqa: E402


class QuorumStrategy(tf.distribute.Strategy):
    """Data-parallel training of processes that may join and leave, over networks of any speed.

    A round is ``sync_every`` steps, in which each process trains on its own. At its end the processes that are
    present average their changes of the weights, weighted by their numbers of samples. A process that is late, dies or
    joins costs the others at most a grace period:

    - A round begins when all processes are ready; or ``grace`` seconds after ``quorum`` of them are, without the rest.
    - A round counts for all that took part, or for none: if a process dies in it, the others repeat it without that
      process.
    - A process that missed a round adds its changes to the new common weights, and brings them to the next round.
    - A process that is started, or restarted, takes the weights, the optimizer's state and the number of the epoch from
      another process, and goes on from there.

    ``rule=Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))`` makes it DiLoCo, for rounds of hundreds of
    steps.

    Every process trains on all the data that `fit` is given, with a batch size of its own, as with
    `tfdist.ParameterServerStrategy`: a batch cannot be divided among processes that may be gone. Give each process
    different data, by `rank` and `size`, or rely on shuffling. An epoch ends for all processes when it ends for one;
    then weights and layers' state are equal on all that took part in its last round. Each process has its own metrics.

    Processes communicate over TCP (ZeroMQ), without MPI. With a secret, all messages are encrypted.

    Example:
        >>> outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
        >>> strategy = tfdist.QuorumStrategy(sync_every=64, rule=outer, quorum=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adamw", "mse")
        >>> model.fit(x[strategy.rank :: strategy.size], y[strategy.rank :: strategy.size], batch_size=64)

    Args:
        cluster_resolver: description of the cluster; see `tfdist.AllReduceStrategy`. It lists all tasks that may join.
        sync_every: number of steps in a round, or an interval of `tfdist.local_sgd`.
        quorum: the least number of processes that a round needs.
        grace: seconds for which a round waits for more processes than those, and for the parts of a message.
        rule: `tfdist.local_sgd.Averaging` or `Outer`, without ``mix``. A process that joins takes the state of an outer
            optimizer from another process.
        compression: how the changes are compressed, as in `tfdist.AllReduceStrategy`, but not by methods that need the
            sum of all processes.
        devices: this process's devices, which take each step together; see `tfdist.AllReduceStrategy`.
        timeouts: how long to wait for other tasks; ``start`` is also how long a process waits for a quorum.

    Raises:
        TypeError: ``rule`` or ``compression`` has the wrong type.
        ValueError: an argument is out of its range.
        ClusterSpecError: TF_CONFIG or the resolver does not describe a cluster that contains this task; the cluster has
            parameter servers; or an MPI launcher started the processes.
        RendezvousError: the chief cannot be reached, or has refused this process.

    References:
        Douillard et al., *DiLoCo: distributed low-communication training of language models*, 2023. Jaghouar et al.,
        *INTELLECT-1 technical report*, 2024. McMahan et al., *Communication-efficient learning of deep networks from
        decentralized data*, 2017.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        sync_every: int | Interval = 64,
        quorum: int = 1,
        grace: float = 10.0,
        rule: Rule = Averaging(),  # noqa: B008
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        interval = sync_every if isinstance(sync_every, Interval) else Every(sync_every)
        _check(quorum, grace, rule)
        chosen = None if compression is None else policy.as_policy(compression)
        if compression is not None:
            differences.check(compression, STRATEGY)
        if devices is not None:
            devices = device_names.all_resolved(f"{STRATEGY}(devices=…)", devices)
        cluster = discovery.discover(cluster_resolver)
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        self._cluster = cluster = _checked(cluster, quorum)
        timeouts = Timeouts.of(timeouts)
        self._members = _members(cluster, quorum, float(grace), timeouts)
        keras_seams.install_for(self)
        local_devices = own_devices(devices, *place_on_host(cluster))
        described = f"sync_every={interval}, rule={rule.for_fragment(self.size, 0)}, compression={chosen}"
        courses = QuorumRoundsFactory(
            self._members, interval, functools.partial(rule.for_fragment, self.size, 0), chosen, described
        )
        super().__init__(QuorumExtended(self, world.alone().group, local_devices, courses, self.rank, self.size))

    @property
    def rank(self) -> int:
        """Rank of this process among the training tasks of the cluster; the chief's is 0."""
        return 0 if self._cluster is None or self._cluster.rank is None else self._cluster.rank

    @property
    def size(self) -> int:
        """Number of training tasks in the cluster, whether they are present or not."""
        return 1 if self._cluster is None else self._cluster.size

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver

    def communication(self) -> dict[str, float]:
        """Returns figures of this process's communication since it started.

        Returns:
            The numbers of ``rounds`` that the process has taken part in, and of ``messages`` and ``bytes`` that it has
            sent; and the ``seconds`` that it has spent in rounds, including waiting.
        """
        links = self._members.links if isinstance(self._members, ClusterMembers) else None
        return {
            "rounds": self.extended.totals.rounds,
            "messages": 0 if links is None else links.messages_sent,
            "bytes": 0 if links is None else links.bytes_sent,
            "seconds": self.extended.totals.seconds,
        }

    def settle(self, model: keras.Model) -> None:
        """Ends the round for a model, together with processes that do so too. For custom training loops, before saving.

        Args:
            model: a Keras model that was made in the scope of this strategy.
        """
        self.extended.settle(model)


def _checked(cluster: Cluster | None, quorum: int) -> Cluster | None:
    """Checks the cluster, and marks it as one whose processes may join and leave; None for a process alone."""
    if cluster is None:
        if launcher.size() > 1:
            raise ClusterSpecError(
                f"{STRATEGY} does not use MPI, because processes that mpiexec or srun has started cannot join again: "
                "start each process with TF_CONFIG, or all of them by `tfdist run`."
            )
        return None
    if cluster.rank is None and cluster.task.job != "evaluator":
        raise ClusterSpecError(
            f"{STRATEGY} trains on the chief and the workers of a cluster; this process is {cluster.task}."
        )
    if any(task.job == "ps" for task in cluster.tasks):
        raise ClusterSpecError(f"{STRATEGY} uses no parameter servers, but the cluster has some: leave out the job ps.")
    if quorum > cluster.size:
        raise ValueError(
            f"{STRATEGY}(quorum={quorum}) is too large: the cluster has only {cluster.size} training task(s)"
        )
    if cluster.rank is None or cluster.size < 2:
        return None
    return dataclasses.replace(cluster, has_elastic_workers=True)


def _members(cluster: Cluster | None, quorum: int, grace: float, timeouts: Timeouts) -> Members:
    if cluster is None:
        return SingleProcessMembers()
    control = job.enter(cluster, timeouts).control
    links = Links(control.task, cluster.task.address.rpartition(":")[0], Keys.of_secret(read_secret()))
    return ClusterMembers(control, links, quorum, grace, timeouts)


def _check(quorum: object, grace: object, rule: object) -> None:
    if not isinstance(quorum, int) or isinstance(quorum, bool) or quorum < 1:
        raise ValueError(f"{STRATEGY}(quorum=…) must be a whole number of processes, at least 1; got {quorum!r}")
    if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not grace > 0:
        raise ValueError(f"{STRATEGY}(grace=…) must be a number of seconds above 0; got {grace!r}")
    if not isinstance(rule, Averaging):
        raise TypeError(
            f"{STRATEGY}(rule=…) must be Averaging() or Outer(…) of tfdist.local_sgd, such as "
            f"Outer(keras.optimizers.SGD(0.7)); got {rule!r}"
        )
    if rule.mix is not None:
        raise ValueError(
            f"{STRATEGY}(rule=…): no steps are taken while weights are exchanged: leave out mix={rule.mix}"
        )
