"""Several ranks as threads of one process, each with an engine; transfers are between threads.

A fake plays the rendezvous server: all ranks get one number for a key, when all of its members have asked. Ranks fail
if their signatures differ.
"""

import contextlib
import faulthandler
import sys
import threading

import pytest
import tensorflow as tf

from tfdist.cluster.messages import Stalled, StallReport
from tfdist.cluster.settings import Timeouts
from tfdist.comm.local import LocalWorld
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import CollectiveTimeoutError, MismatchError

DEADLINE = 600.0
"""Seconds by the clock for what takes some seconds: on a machine that is busy with much else, a rank may be slow."""


class Agreeing:
    """Numbers keys as the server does: the same for all ranks, on the thread of the one that asks last.

    Args:
        size: number of ranks.

    Attributes:
        told: failures that ranks have told of.
    """

    def __init__(self, size):
        self.size = size
        self.failure, self.departed, self.names, self.joined, self.stall = None, {}, {}, {}, None
        self._signatures, self.told = {}, []
        self._numbers, self._waiting, self._lock = {}, {}, threading.Lock()

    def attend(self, listener):
        pass

    def tell_failure(self, error, members=None):
        self.told.append(error)
        self.failure = self.failure or error

    def send(self, message):
        if isinstance(message, Stalled):
            self.stall = StallReport("", {})

    def ask(self, make, then, refused):
        message = make(0)
        site = (message.key, message.members)
        with self._lock:
            signatures = self._signatures.setdefault(site, [])
            signatures.append(message.signature)
            waiting = self._waiting.setdefault(site, [])
            waiting.append(then)
            if len(waiting) < len(message.members or range(self.size)):
                return
            if len(set(signatures)) > 1:
                self.failure = MismatchError(f"{message.key}: {', '.join(signatures)}")
                return
            number = self._numbers.setdefault(site, len(self._numbers))
        for callback in waiting:
            callback(number)


class Ranks:
    """Several ranks in this process, each with its own engine.

    Args:
        size: number of ranks.
        algorithm: name of the all-reduce algorithm.

    Attributes:
        control: stand-in for the rendezvous, through which the ranks agree on keys.
        groups: each rank's group of all ranks, by rank.
    """

    def __init__(self, size, algorithm="ring"):
        world = LocalWorld(size)
        self.control = Agreeing(size)
        self._engines = [
            Engine(world.communicator(rank), self.control, Timeouts(collective=DEADLINE / 2), tags=1 << 20)
            for rank in range(size)
        ]
        self.groups = [ProcessGroup(engine, None, algorithm) for engine in self._engines]

    def __call__(self, work, *arguments):
        """What ``work(group, *arguments)`` returns on each rank; raises the first error of one."""
        results, errors = [None] * len(self.groups), []

        def run(rank):
            try:
                results[rank] = work(self.groups[rank], *arguments)
            except Exception as error:
                if isinstance(error, CollectiveTimeoutError) and not errors:
                    faulthandler.dump_traceback(sys.__stderr__)  # where is the one that it has waited for?
                errors.append(error)
                self.control.failure = self.control.failure or error  # so that the others do not wait

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a rank waits for the others"
        if errors:
            raise errors[0]
        return results

    def close(self):
        for engine in self._engines:
            engine.close()


@pytest.fixture(scope="module")
def ranks():
    """Makes `Ranks`; closes them."""
    with contextlib.ExitStack() as stack:

        def make(size, algorithm="ring"):
            made = Ranks(size, algorithm)
            stack.callback(made.close)
            return made

        yield make


def eagerly(function, *arguments):
    """Calls a function."""
    return function(*arguments)


def in_a_graph(function, *arguments):
    """Calls a function in a graph of its own."""
    return tf.function(function)(*arguments)


BOTH_WAYS = pytest.mark.parametrize(("size", "call"), [(3, eagerly), (2, in_a_graph)])
"""Numbers of ranks, and how they call. In graphs there are two: each keeps one of TensorFlow's threads waiting."""


def arrays_of(dtypes, shapes):
    """Each dtype with each shape."""
    return pytest.mark.parametrize(("dtype", "shape"), [(dtype, shape) for dtype in dtypes for shape in shapes])
