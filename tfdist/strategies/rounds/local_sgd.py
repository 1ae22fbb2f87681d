"""`LocalSGDStrategy`: processes train on their own, and average their weights from time to time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfdist import whole_numbers
from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist import other_names  # noqa: E402
from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.collectives import algorithms  # noqa: E402
from tfdist.compression import Method, policy  # noqa: E402
from tfdist.compression.compressor import Compressor  # noqa: E402
from tfdist.compression.policy import FewerWorkers, Policy, Schedule  # noqa: E402
from tfdist.local_sgd.intervals import Every, Interval  # noqa: E402
from tfdist.local_sgd.rounds import LocalSGD, Settings  # noqa: E402
from tfdist.local_sgd.rules import Averaging, Rule  # noqa: E402
from tfdist.local_sgd.streaming import Streaming  # noqa: E402
from tfdist.runtime.groups import Group  # noqa: E402
from tfdist.strategies.rounds.processes_in_rounds import ProcessesInRounds  # noqa: E402
from tfdist.strategies.rounds.rounds_extended import RoundsExtended  # noqa: E402

_ARGUMENTS = {
    "outer": "rule=tfdist.local_sgd.Outer(…)",
    "elastic": "rule=tfdist.local_sgd.Elastic(…)",
    "mix": "rule=, a tfdist.local_sgd.Rule of your own",
    "fragments": "streaming=tfdist.local_sgd.Streaming(fragments=…)",
    "delay": "streaming=tfdist.local_sgd.Streaming(delay=…)",
}
"""Arguments that the strategy does not take, and what to use instead."""


class LocalSGDStrategy(ProcessesInRounds):
    """Data-parallel training over slow networks: processes train on their own, and average weights after many steps.

    A round is ``sync_every`` steps, in which each process trains on its share of the batches and sends nothing. At its
    end the changes that the processes have made to the weights are averaged, weighted by their numbers of samples. The
    end of an epoch also ends a round: when `fit` validates, calls callbacks and returns, all processes have equal
    weights.

    - By default all processes go on with the average: local SGD. With ``sync_every=1`` and plain SGD that is
      synchronous SGD.
    - ``rule=Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))`` updates the common weights by an outer
      optimizer, which treats the average change as a gradient: DiLoCo. Rounds may then have hundreds of steps.
    - ``streaming=Streaming(fragments=4, delay=2)`` exchanges the weights in parts, each while the next steps are
      computed: Streaming DiLoCo.
    - ``rule=Elastic(0.9)`` pulls the processes' weights towards common weights, elastically: EASGD.

    Steps between exchanges send nothing: metrics too are merged at the end of an epoch, and the progress bar shows
    those of the first process. As in `tfdist.AllReduceStrategy`, a batch of ``fit`` is global, and processes take
    shares of it. Data from `distribute_datasets_from_function` may differ in length: a process that has no more data
    waits for the others, and takes part in their rounds with weight zero.

    Example:
        >>> outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
        >>> strategy = tfdist.LocalSGDStrategy(sync_every=64, rule=outer)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adamw", "mse")
        >>> model.fit(x, y, batch_size=256)

    Args:
        cluster_resolver: description of the cluster; see `tfdist.AllReduceStrategy`.
        sync_every: number of steps in a round, or an interval of `tfdist.local_sgd`, such as
            ``Growing(first=4, every=1000)`` or ``QuadraticRule(alpha=0.02)``, by which rounds grow as training goes on.
        start_after: number of steps at the start that processes take together: after each of them weights and the
            optimizer's slots are averaged. With SGD, with or without momentum, that is synchronous training. The
            training that follows is post-local SGD.
        slots: whether each process keeps its own optimizer slots (``"keep"``), or a round averages them, too
            (``"average"``), which sends more bytes.
        rule: how a round combines the weights of all processes: `tfdist.local_sgd.Averaging`, `Outer` or `Elastic`, or
            your own `tfdist.local_sgd.Rule`.
        streaming: a `tfdist.local_sgd.Streaming`, which exchanges weights in parts, and while steps are computed.
        compression: how the changes are compressed, as in `tfdist.AllReduceStrategy`; by default not at all.
        devices: this process's devices, which take each step together; see `tfdist.AllReduceStrategy`.
        timeouts: how long to wait for other tasks; a `tfdist.Timeouts`.
        algorithm: the all-reduce algorithm of a round; see `tfdist.AllReduceStrategy`.
        check_weights: whether `fit` compares the weights of all processes after each epoch.
        group: the processes that train this model together; by default all of the job.

    Raises:
        MismatchError: processes have different arguments.
        TypeError: ``rule``, ``streaming`` or ``compression`` has the wrong type.
        ValueError: an argument is out of its range, or two of them exclude each other.
        ClusterSpecError: TF_CONFIG or the resolver does not describe a cluster that contains this task.
        RendezvousError: not all tasks entered the job, or this one was refused.
        MPIUnavailableError: no MPI library can be loaded.

    References:
        Stich, *Local SGD converges fast and communicates little*, ICLR 2019. Lin, Stich, Patel and Jaggi, *Don't use
        large mini-batches, use local SGD*, ICLR 2020. Douillard et al., *DiLoCo: distributed low-communication training
        of language models*, 2023, and *Streaming DiLoCo with overlapping communication*, 2025. Zhang, Choromanska and
        LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015.
    """

    @other_names.hint_unknown_arguments(_ARGUMENTS)
    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        sync_every: int | Interval = 8,
        start_after: int = 0,
        slots: str = "keep",
        rule: Rule = Averaging(),  # noqa: B008
        streaming: Streaming = Streaming(),  # noqa: B008
        compression: Method | FewerWorkers | Schedule | Policy | None = None,
        devices: Sequence[str] | None = None,
        timeouts: Timeouts | None = None,
        algorithm: str = "auto",
        check_weights: bool = True,
        group: Group | None = None,
    ) -> None:
        interval = sync_every if isinstance(sync_every, Interval) else Every(sync_every)
        _check(interval, start_after, slots, rule, streaming)
        policy.as_policy(compression)  # raises its errors before waiting for other processes
        algorithms.check(algorithm)
        cluster = discovery.discover(cluster_resolver)
        timeouts = Timeouts.of(timeouts)
        engine_group, chosen = self._enter(cluster, cluster_resolver, devices, timeouts, algorithm, group)
        settings = Settings(
            interval,
            functools.partial(rule.for_fragment, engine_group.size, streaming.delay),
            streaming.fragments,
            streaming.delay,
            start_after,
            slots == "average",
        )
        compressor = None if compression is None else Compressor(compression, engine_group.rank, engine_group.size)
        settled = (
            f"sync_every={interval}, start_after={start_after}, slots={slots!r}, "
            f"rule={rule.for_fragment(engine_group.size, streaming.delay)}, {streaming}, compression={compressor}"
        )
        courses = LocalSGD(engine_group, settings, compressor, settled)
        super().__init__(RoundsExtended(self, engine_group, chosen, courses, check_weights))


def _check(interval: Interval, start_after: int, slots: str, rule: object, streaming: object) -> None:
    where = "LocalSGDStrategy"
    whole_numbers.check(f"{where}(start_after=…)", start_after, least=0)
    if slots not in ("keep", "average"):
        raise ValueError(f"{where}(slots=…) must be 'keep' or 'average'; got {slots!r}")
    if not isinstance(rule, Rule):
        raise TypeError(
            f"{where}(rule=…) must be a rule of tfdist.local_sgd, such as Outer(keras.optimizers.SGD(0.7)); got "
            f"{rule!r}"
        )
    if not isinstance(streaming, Streaming):
        raise TypeError(f"{where}(streaming=…) must be a tfdist.local_sgd.Streaming; got {streaming!r}")
    streaming.check(interval)
    if slots == "average" and streaming != Streaming():
        raise ValueError(f"{where}(slots='average') needs all weights to be exchanged at once: leave out streaming=")
