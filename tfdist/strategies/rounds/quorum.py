"""`QuorumStrategy`: processes that come and go train on their own, and average what they have learned in rounds."""

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
from tfdist.quorum.contributions import WHO  # noqa: E402
from tfdist.quorum.course import Quorums  # noqa: E402
from tfdist.quorum.links import Links  # noqa: E402
from tfdist.quorum.members import Alone, Members, Together  # noqa: E402
from tfdist.runtime import job, world  # noqa: E402
from tfdist.strategies.devices import device_names  # noqa: E402
from tfdist.strategies.devices.devices import own_devices, place_on_host  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402
from tfdist.strategies.rounds.quorum_extended import QuorumExtended  # noqa: E402


class QuorumStrategy(tf.distribute.Strategy):
    """Data-parallel training of processes that come and go, over lines of any speed.

    A round is ``sync_every`` steps, in which each process trains on its own. At its end those that are there average
    what they have learned, each by the number of samples that it stands for. Who is late, dies, or joins anew costs the
    others no more than a time of grace:

    - A round begins when all are ready; or, once ``quorum`` of them are, ``grace`` seconds later, without the rest.
    - It counts for all that took part, or for nobody: if one dies in it, the others make it again without it.
    - A process that a round was made without goes on from the new common weights, with what it has learned added, and
      brings that to the next round.
    - A process that is started anew, or again, takes weights, the optimizer's state and the number of the epoch from
      another one, and goes on with it.

    ``rule=Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))`` makes it DiLoCo, for rounds of hundreds of
    steps.

    Every process trains on all the data that `fit` is given, with a batch size of its own, as with
    `tfdist.ParameterServerStrategy`: nobody can deal out shares of a batch to processes that may be gone. Give each
    other data, by `rank` and `size`, or leave it to the shuffling. An epoch ends for all when it ends for one; then
    weights and what layers keep are equal on all that took part in its last round. Metrics are each process's own.

    Processes meet over TCP (ZeroMQ), without MPI. With a secret, all of it is encrypted.

    Example:
        >>> outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
        >>> strategy = tfdist.QuorumStrategy(sync_every=64, rule=outer, quorum=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adamw", "mse")
        >>> model.fit(x[strategy.rank :: strategy.size], y[strategy.rank :: strategy.size], batch_size=64)

    Args:
        cluster_resolver: as of `tfdist.AllReduceStrategy`. The tasks must be listed; they need not all be there.
        sync_every: steps of a round; as of `tfdist.LocalSGDStrategy`.
        quorum: how many processes a round needs at least.
        grace: seconds for which a round waits for more than those; also for pieces of what a process sends.
        rule: `tfdist.local_sgd.Averaging` or `Outer`, without ``mix``. A process that joins takes the state of an outer
            optimizer from another one.
        compression: as of `tfdist.AllReduceStrategy`, of the differences between weights; without methods for processes
            that add up.
        devices: as of `tfdist.LocalSGDStrategy`.
        timeouts: as of `tfdist.AllReduceStrategy`; ``start`` is also how long a process waits for a quorum.

    Raises:
        TypeError: ``rule`` or ``compression`` is none.
        ValueError: an argument is out of its range.
        ClusterSpecError: as of `tfdist.AllReduceStrategy`; or processes were started by an MPI launcher.
        RendezvousError: as of `tfdist.AllReduceStrategy`.

    References:
        Douillard et al., *DiLoCo: distributed low-communication training of language models*, 2023. Jaghouar et al.,
        *INTELLECT-1 technical report*, 2024. McMahan et al., *Communication-efficient learning of deep networks from
        decentralized data*, 2017.
    """

    # Read by MirroredExtended; used only among this process's devices.
    _collective_key_base = 0

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
            differences.check(compression, WHO)
        if devices is not None:
            devices = device_names.all_resolved(f"{WHO}(devices=…)", devices)
        cluster = discovery.discover(cluster_resolver)
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        self._cluster = cluster = _checked(cluster, quorum)
        timeouts = Timeouts.of(timeouts)
        self._members = _members(cluster, quorum, float(grace), timeouts)
        keras_seams.install_for(self)
        own = own_devices(devices, *place_on_host(cluster))
        described = f"sync_every={interval}, rule={rule.begun(self.size, 0)}, compression={chosen}"
        courses = Quorums(self._members, interval, functools.partial(rule.begun, self.size, 0), chosen, described)
        super().__init__(QuorumExtended(self, world.alone().group, own, courses, self.rank, self.size))

    @property
    def rank(self) -> int:
        """This process's place among the training tasks of the cluster; the chief's is 0."""
        return 0 if self._cluster is None or self._cluster.rank is None else self._cluster.rank

    @property
    def size(self) -> int:
        """How many training tasks the cluster has, whether they are there or not."""
        return 1 if self._cluster is None else self._cluster.size

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver

    def communication(self) -> dict[str, float]:
        """The communication of this process since it started.

        Returns:
            The number of ``rounds`` that it has taken part in, and of ``messages`` and ``bytes`` sent; and the
            ``seconds`` spent in rounds, waiting for others too.
        """
        links = self._members.links if isinstance(self._members, Together) else None
        return {
            "rounds": self.extended.totals.rounds,
            "messages": 0 if links is None else links.messages_sent,
            "bytes": 0 if links is None else links.bytes_sent,
            "seconds": self.extended.totals.seconds,
        }

    def settle(self, model: keras.Model) -> None:
        """Ends the round for a model, with those that end theirs, too: in training loops of one's own, before saving.

        Args:
            model: that was made in the scope of this strategy.
        """
        self.extended.settle(model)


def _checked(cluster: Cluster | None, quorum: int) -> Cluster | None:
    """The cluster as one whose tasks come and go; None for a process alone."""
    if cluster is None:
        if launcher.size() > 1:
            raise ClusterSpecError(
                f"{WHO} needs no MPI, and processes that mpiexec or srun has started cannot come again: start each "
                "with TF_CONFIG, or all of them by `tfdist run`."
            )
        return None
    if cluster.rank is None and cluster.task.job != "evaluator":
        raise ClusterSpecError(
            f"{WHO} trains on the chief and the workers of a cluster; this process is {cluster.task}."
        )
    if any(task.job == "ps" for task in cluster.tasks):
        raise ClusterSpecError(f"{WHO} has no parameter servers, and the cluster names some: leave the job ps out.")
    if quorum > cluster.size:
        raise ValueError(f"{WHO}(quorum={quorum}): the cluster has {cluster.size} training task(s) only")
    if cluster.rank is None or cluster.size < 2:
        return None
    return dataclasses.replace(cluster, comes_and_goes=True)


def _members(cluster: Cluster | None, quorum: int, grace: float, timeouts: Timeouts) -> Members:
    if cluster is None:
        return Alone()
    control = job.enter(cluster, timeouts).control
    links = Links(control.task, cluster.task.address.rpartition(":")[0], Keys.of_secret(read_secret()))
    return Together(control, links, quorum, grace, timeouts)


def _check(quorum: object, grace: object, rule: object) -> None:
    if not isinstance(quorum, int) or isinstance(quorum, bool) or quorum < 1:
        raise ValueError(f"{WHO}(quorum=…) is a number of processes from 1; got {quorum!r}")
    if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not grace > 0:
        raise ValueError(f"{WHO}(grace=…) is a number of seconds above 0; got {grace!r}")
    if not isinstance(rule, Averaging):
        raise TypeError(
            f"{WHO}(rule=…) is Averaging() or Outer(…) of tfdist.local_sgd, such as "
            f"Outer(keras.optimizers.SGD(0.7)); got {rule!r}"
        )
    if rule.mix is not None:
        raise ValueError(f"{WHO}(rule=…): nothing is computed while weights are exchanged: leave out mix={rule.mix}")
