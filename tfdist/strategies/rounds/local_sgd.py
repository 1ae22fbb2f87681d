"""`LocalSGDStrategy`: processes train on their own and exchange what they have learned now and then."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
"""Arguments that it had, and what they are here."""


class LocalSGDStrategy(ProcessesInRounds):
    """Data-parallel training over slow lines: processes take steps on their own, and average weights now and then.

    A round is ``sync_every`` steps, in which each process trains on its share of the batches and sends nothing. At its
    end the differences that the processes have made to the weights are averaged, each by the number of samples that it
    stands for. An epoch's end ends a round: when `fit` validates, calls callbacks and returns, all processes have equal
    weights.

    - By default all go on with the average: local SGD. With ``sync_every=1`` and plain SGD that is synchronous SGD.
    - ``rule=Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))`` moves the common weights by an optimizer of
      their own, which takes the average difference for a gradient: DiLoCo. Rounds may then be of hundreds of steps.
    - ``streaming=Streaming(fragments=4, delay=2)`` exchanges the weights in parts, each while the next steps are
      computed: Streaming DiLoCo.
    - ``rule=Elastic(0.9)`` ties the processes to common weights by springs: EASGD.

    What a step costs is the model's alone, whatever the line: metrics too are merged at the end of an epoch, and the
    progress bar shows those of the first process. As in `tfdist.AllReduceStrategy`, a batch of ``fit`` is global, and
    processes take shares of it; data from `distribute_datasets_from_function` may differ in length: a process that has
    no more waits for the others, and takes part in their rounds without weight.

    Example:
        >>> outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
        >>> strategy = tfdist.LocalSGDStrategy(sync_every=64, rule=outer)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adamw", "mse")
        >>> model.fit(x, y, batch_size=256)

    Args:
        cluster_resolver: as of `tfdist.AllReduceStrategy`.
        sync_every: steps of a round; a number, or an interval of `tfdist.local_sgd`, such as
            ``Growing(first=4, every=1000)`` or ``QuadraticRule(alpha=0.02)``, by which rounds grow as training goes on.
        start_after: a number of steps at the start that are taken together: after each of them weights and the
            optimizer's slots are averaged, which with SGD, with or without momentum, is synchronous training. What
            comes then is post-local SGD.
        slots: what becomes of the optimizer's slots in a round: each process goes on with its own (``"keep"``), or with
            the mean (``"average"``), which sends them too.
        rule: what a round makes of the weights of all processes: `tfdist.local_sgd.Averaging`, `Outer` or `Elastic`, or
            a `tfdist.local_sgd.Rule` of one's own.
        streaming: a `tfdist.local_sgd.Streaming`, to exchange weights in parts, and while steps are computed.
        compression: how the differences are compressed; as of `tfdist.AllReduceStrategy`.
        devices: as of `tfdist.AllReduceStrategy`; this process's devices take each step together.
        timeouts: as of `tfdist.AllReduceStrategy`.
        algorithm: of the sums; as of `tfdist.AllReduceStrategy`.
        check_weights: as of `tfdist.AllReduceStrategy`.
        group: as of `tfdist.AllReduceStrategy`.

    Raises:
        MismatchError: processes have different arguments.
        TypeError: ``rule``, ``streaming`` or ``compression`` is none.
        ValueError: an argument is out of its range, or two of them exclude each other.
        ClusterSpecError: as of `tfdist.AllReduceStrategy`.
        RendezvousError: as of `tfdist.AllReduceStrategy`.
        MPIUnavailableError: as of `tfdist.AllReduceStrategy`.

    References:
        Stich, *Local SGD converges fast and communicates little*, ICLR 2019. Lin, Stich, Patel and Jaggi, *Don't use
        large mini-batches, use local SGD*, ICLR 2020. Douillard et al., *DiLoCo: distributed low-communication training
        of language models*, 2023, and *Streaming DiLoCo with overlapping communication*, 2025. Zhang, Choromanska and
        LeCun, *Deep learning with elastic averaging SGD*, NeurIPS 2015.
    """

    @other_names.of_arguments(_ARGUMENTS)
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
        own, chosen = self._enter(cluster, cluster_resolver, devices, timeouts, algorithm, group)
        settings = Settings(
            interval,
            functools.partial(rule.begun, own.size, streaming.delay),
            streaming.fragments,
            streaming.delay,
            start_after,
            slots == "average",
        )
        compressor = None if compression is None else Compressor(compression, own.rank, own.size)
        settled = (
            f"sync_every={interval}, start_after={start_after}, slots={slots!r}, "
            f"rule={rule.begun(own.size, streaming.delay)}, {streaming}, compression={compressor}"
        )
        courses = LocalSGD(own, settings, compressor, settled)
        super().__init__(RoundsExtended(self, own, chosen, courses, check_weights))


def _check(interval: Interval, start_after: int, slots: str, rule: object, streaming: object) -> None:
    where = "LocalSGDStrategy"
    if not isinstance(start_after, int) or isinstance(start_after, bool) or start_after < 0:
        raise ValueError(f"{where}(start_after=…) is a number from 0; got {start_after!r}")
    if slots not in ("keep", "average"):
        raise ValueError(f"{where}(slots=…) is 'keep' or 'average'; got {slots!r}")
    if not isinstance(rule, Rule):
        raise TypeError(
            f"{where}(rule=…) is a rule of tfdist.local_sgd, such as Outer(keras.optimizers.SGD(0.7)); got {rule!r}"
        )
    if not isinstance(streaming, Streaming):
        raise TypeError(f"{where}(streaming=…) is a tfdist.local_sgd.Streaming; got {streaming!r}")
    streaming.check(interval)
    if slots == "average" and streaming != Streaming():
        raise ValueError(f"{where}(slots='average') needs weights that are exchanged at once: no streaming=")
