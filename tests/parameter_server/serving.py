"""A parameter server on a thread, and connections to it."""

import contextlib
import threading

import keras
import numpy as np

from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import Gradients, Hogwild
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.messages import Attach, CreateShard, Pull, Push, Values
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.server.server import ParameterServer
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.features import features_of
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.shard.stores import new_store_of
from tfdist.parameter_server.worker.client import Connection

DEADLINE = 30.0
SIZE = 1000


@contextlib.contextmanager
def serving(
    mode=Asynchronous(),  # noqa: B008
    address="127.0.0.1:0",
    keys=None,
    compression=None,
    tables=None,
    deals=None,
    pull_compression=None,
    is_lazy=False,
    is_hogwild=False,
    chief=0,
):
    pushes = Gradients(compression, pull_compression, sparse="lazy" if is_lazy else "exact")
    arguments = Arguments(mode, Hogwild() if is_hogwild else pushes)

    def make(model, occurrence):
        return Shard(Ledger(mode), None, features_of(arguments), new_store_of(arguments))

    server = ParameterServer(Shards(make, tables, deals, chief=chief), address, keys)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(server, timeout=DEADLINE, keys=None):
    connection = Connection(getattr(server, "address", server), "ps 0", timeout, keys)
    try:
        yield connection
    finally:
        connection.close()


def create(connection):
    optimizer = keras.saving.serialize_keras_object(keras.optimizers.SGD(1.0))
    held = (HeldRows("w", 0, SIZE, SIZE),)
    values = [np.zeros(SIZE, np.float32)]
    return connection.request(lambda id: CreateShard(id, 0, 1, "model", held, optimizer, True, ((),)), values)[0]


def attach(connection, worker=0, model="model"):
    return connection.request(lambda id: Attach(id, worker, 1, model))[0]


def push(connection, worker=0, clock=0, value=1.0):
    gradient = np.full(SIZE, value, np.float32)
    return connection.request(lambda id: Push(id, worker, 1, clock, clock, 0, 1.0), [gradient])[0]


def pull(connection, worker=0):
    answer, (values,) = connection.request(lambda id: Pull(id, worker, 1))
    assert isinstance(answer, Values)
    return values
