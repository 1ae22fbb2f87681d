"""Workers that get rows in place of variables have what the server has, to the last bit, whatever is said or lost.

Everything is random: whose turn it is, which gradients are sparse, which messages are lost or come twice, and when the
server is started again. What a worker has is compared with what the server had at that edition.
"""

import keras
import numpy as np
import pytest

from tests.sweeps import some
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.staleness import DelayCompensated, Unscaled
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attach,
    CreateShard,
    Pull,
    Push,
    Refused,
    Values,
)
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.features import features_of
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.worker.replica import Replica

SHAPES = [(40, 3), (5,), (30, 2), ()]
KINDS = [
    ("sparse", "dense", "sparse", "dense"),
    ("sparse", "dense", "none", "none"),
    ("dense", "none", "sparse", "none"),
    ("dense",) * 4,
]
"""Kinds of the variables' gradients; a graph is made for each entry."""


def shapes():
    return Shapes(SHAPES, [np.dtype(np.float32)] * 4)


class Job:
    """A server, and what its values were at each edition."""

    def __init__(self, generator, optimizer, mode):
        self.config = keras.saving.serialize_keras_object(optimizer)
        self.made = lambda: Shard(Ledger(mode), features=features_of(Arguments(mode)))
        self.generator = generator
        self.held = tuple(
            HeldRows(f"v{place}", 0, *[shape[0] if shape else 1] * 2) for place, shape in enumerate(SHAPES)
        )
        self.shard, self.history, self.number = self.made(), {}, 0
        self.start(TrainingState([generator.normal(size=shape).astype("float32") for shape in SHAPES], [{}] * 4))

    def start(self, state):
        self.say(Attach, 0, 1, "model")
        names = state.names()
        self.say(CreateShard, 0, 1, "model", self.held, self.config, True, *names, arrays=state.arrays())

    def start_again(self):
        state = self.shard.store.state()
        self.shard = self.made()
        self.start(state)

    def say(self, kind, *fields, arrays=(), replies=None, **options):
        replies = [] if replies is None else replies
        self.number += 1
        self.shard.heard(kind(self.number, *fields, **options), list(arrays), lambda *reply: replies.append(reply))
        if self.shard.store is not None:
            arrays = [array.copy() for array in self.shard.store.state().values]
            self.history.setdefault(self.shard.store.edition, arrays)
        return replies


class Worker:
    """Pushes, and applies what comes to variables of its own, as the graph does."""

    def __init__(self, job, number, prefetch):
        self.job, self.number, self.prefetch = job, number, prefetch
        self.replica, self.under_way, self.sequence = Replica(shapes()), [], 0
        self.by_rows = 0
        self.job.say(Attach, number, 1, "model")
        self.pull()

    def pull(self):
        self.finish()
        (answer, arrays) = self.deliver((Pull, (self.number, 1), (), {}, []))
        assert answer.kinds == ()
        self.replica.receive(answer.edition, answer.kinds, arrays)
        layout = shapes().layout()
        self.variables = [array.copy() for array in layout.arrays(self.replica.take()).values()]
        self.check()

    def push(self):
        generator = self.job.generator
        kinds = KINDS[generator.choice(len(KINDS), p=[0.5, 0.3, 0.1, 0.1])]
        arrays = [generator.normal(size=shape).astype("float32") for shape in SHAPES]
        sparse = {}
        for place, kind in enumerate(kinds):
            if kind == "sparse":
                indices = generator.integers(0, SHAPES[place][0], generator.integers(0, 4))
                sparse[place] = generator.normal(size=(len(indices), *SHAPES[place][1:])).astype("float32"), indices
        gradients = PushedGradients(kinds, shapes().layout(kinds).vectors(arrays), sparse)
        self.replica.keep(sparse)
        version = self.job.shard.ledger.version
        fields = self.number, 1, self.sequence, self.sequence, version, 1.0, kinds
        options = {"has": self.replica.has}
        self.sequence += 1
        self.under_way.append((Push, fields, gradients.arrays(), options, []))
        if generator.random() < 0.8:  # else it is lost, or late
            self.say(self.under_way[-1])
        while len(self.under_way) > self.prefetch:
            if not self.receive(sparse):
                return
        self.apply(list(sparse))

    def say(self, message):
        kind, fields, arrays, options, replies = message
        self.job.say(kind, *fields, arrays=arrays, replies=replies, **options)
        if replies and isinstance(replies[-1][0], Refused):
            assert replies.pop()[0].is_unknown
            self.job.say(Attach, self.number, 1, "model")
            self.job.say(kind, *fields, arrays=arrays, replies=replies, **options)

    def deliver(self, message):
        """The first answer, if it may come already. The message may have come before, and comes again."""
        replies = message[-1]
        again = self.job.generator.random() < 0.2
        if again or not any(isinstance(reply[0], Values) for reply in replies):
            self.say(message)
        return next((reply for reply in replies if isinstance(reply[0], Values)), None)

    def receive(self, places):
        reply = self.deliver(self.under_way[0])
        if reply is None:
            self.waits_for = list(places)
            return False
        self.under_way.pop(0)
        answer, arrays = reply
        self.by_rows += answer.kinds.count("sparse")
        self.replica.receive(answer.edition, answer.kinds, arrays)
        return True

    def finish(self):
        while self.under_way:
            assert self.receive(()), "in modes in which nobody waits"

    def apply(self, places):
        taken = self.replica.take(places)
        kinds = tuple("sparse" if place in places else "dense" for place in range(4))
        layout = shapes().layout(kinds)
        for place, array in layout.arrays(taken[: len(layout.dtypes)]).items():
            self.variables[place] = array.copy()
        rest = iter(taken[len(layout.dtypes) :])
        for place in places:
            rows, indices = next(rest), next(rest)
            self.variables[place][indices] = rows
        self.check()

    def check(self):
        expected = self.job.history[self.replica.has.edition]
        for variable, value, kept in zip(self.variables, expected, self.replica.values(), strict=True):
            assert variable.tobytes() == value.tobytes()
            assert kept.tobytes() == value.tobytes()


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
}
BY_ROWS = ("sgd", "adagrad", "rmsprop")


@pytest.mark.parametrize(("name", "prefetch"), some(zip(OPTIMIZERS, (1, 0, 1, 0, 1), strict=True)))
def test_pulled_rows_equal_the_servers_values(name, prefetch):
    """With answers that are lost and messages that come twice, assignments, and a server that is started again."""
    generator = np.random.default_rng(len(name) + prefetch)
    policy = DelayCompensated(0.5) if name == "rmsprop" else Unscaled()
    job = Job(generator, OPTIMIZERS[name](), Asynchronous(policy))
    workers = [Worker(job, number, prefetch) for number in range(3)]
    for step in range(100):
        worker = workers[generator.integers(3)]
        if step == 60:
            job.start_again()
        what = generator.random()
        if what < 0.9:
            worker.push()
        elif what < 0.94:
            worker.pull()
        else:
            values = [generator.normal(size=shape).astype("float32") for shape in SHAPES]
            worker.deliver((AssignValues, (worker.number, 1), shapes().layout().vectors(values), {}, []))
    assert (sum(worker.by_rows for worker in workers) > 30) == (name in BY_ROWS)
    for worker in workers:
        worker.pull()


@pytest.mark.parametrize("mode", [BoundedStaleness(0), Synchronous(), SoftSync(1)])
def test_pulled_rows_equal_server_values_in_waiting_modes(mode):
    generator = np.random.default_rng(5)
    job = Job(generator, keras.optimizers.Adagrad(0.1), mode)
    workers = [Worker(job, number, 0) for number in range(2)]
    for _ in range(60):
        for worker in workers:
            if not worker.under_way:
                worker.push()
            elif worker.receive(worker.waits_for):
                worker.apply(worker.waits_for)
    assert sum(worker.by_rows for worker in workers) > 30
