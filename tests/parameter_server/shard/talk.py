"""A shard to talk to, without sockets."""

import functools

import keras
import numpy as np

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.dealing import BeginEpoch, DealtBatch, TakeBatch
from tfdist.parameter_server.protocol.messages import Attach, CreateShard, Pull, Push
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.shard.features import features_of
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard

HELD = (HeldRows("dense/kernel", 0, 4, 4), HeldRows("dense/bias", 0, 3, 3))
ZEROS = [np.zeros((4, 3), np.float32), np.zeros(3, np.float32)]
ONES = [np.ones(15, np.float32)]
"""A gradient: the vector of both variables."""


class Talk:
    """A shard, and what it answers; requests are numbered."""

    def __init__(self, mode=Asynchronous(), workers=1, optimizer=None, created=True, snapshots=None):  # noqa: B008
        self.shard = Shard(Ledger(mode), snapshots, features_of(Arguments(mode)))
        self.answers = {}
        self.number = 0
        for worker in range(workers):
            self.attach(worker)
        if created:
            self.create(optimizer or keras.optimizers.SGD(1.0))

    def say(self, kind, *fields, arrays=(), again=False):
        """Sends a message, under the last number if ``again``; returns its last answer, if there is one yet."""
        self.number += not again
        number, kept = self.number, self.answers.setdefault(self.number, [])
        self.shard.heard(kind(number, *fields), list(arrays), lambda *answer: kept.append(answer))
        return kept[-1][0] if kept else None

    def attach(self, worker, incarnation=1):
        return self.say(Attach, worker, incarnation, "model")

    def create(self, optimizer, arrays=ZEROS, worker=0):
        config = keras.saving.serialize_keras_object(optimizer)
        has_values = arrays is not None
        fields = (worker, 1, "model", HELD, config, has_values, ((), ()) if has_values else ())
        return self.say(CreateShard, *fields, arrays=arrays or ())

    def push(
        self,
        worker=0,
        clock=0,
        sequence=None,
        arrays=ONES,
        kinds=(),
        incarnation=1,
        samples=1.0,
        again=False,
        **options,
    ):
        read = self.shard.ledger.version
        sequence = clock if sequence is None else sequence
        message = functools.partial(Push, **options)
        return self.say(message, worker, incarnation, sequence, clock, read, samples, kinds, arrays=arrays, again=again)

    def pull(self, worker=0, incarnation=1, what="values"):
        return self.say(Pull, worker, incarnation, what)

    @property
    def kernel(self):
        return self.shard.store.vectors()[0][:12].reshape(4, 3)

    @property
    def bias(self):
        return float(self.shard.store.vectors()[0][-1])


class Dealing(Talk):
    """A shard whose workers are dealt one batch after the other."""

    def __init__(self, mode=Asynchronous(), workers=1, batches=9, **options):  # noqa: B008
        super().__init__(mode, workers, **options)
        self.deals = self.shard.tickets.deals = DealerService()
        self.deals.when_idle_changes = self.shard.set_idle
        for worker in range(workers):
            self.deals.heard(BeginEpoch(0, worker, 1, 0, 0, batches, 1, None), [], lambda message, arrays: None)
        self.requests = 0

    def take(self, worker=0):
        self.requests += 1
        answers = []
        self.deals.heard(
            TakeBatch(0, worker, 1, 0, 0, self.requests), [], lambda message, arrays: answers.append(message)
        )
        return answers[-1].ticket if isinstance(answers[-1], DealtBatch) else answers[-1]
