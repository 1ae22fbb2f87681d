"""What a server begins with."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tests.runtime.jobs import cluster_of
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.staleness import DropBeyond, Unscaled
from tfdist.parameter_server.options.synchronization import BoundedStaleness, Synchronous
from tfdist.parameter_server.protocol.messages import Attach, CreateShard, Push
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.protocol.tables import AttachTable
from tfdist.runtime.server_state import ServerStateFactory

HELD = (HeldRows("w", 0, 2, 2),)
SGD = keras.optimizers.SGD(1.0)
KEY = "SGD-1", 0


def template(server=0, folder=None, ps=2):
    cluster = cluster_of("ps", chief=1, worker=1, ps=ps)
    control = SimpleNamespace(job="job", present={})
    options = Arguments(BoundedStaleness(3), servers=Servers(snapshots=folder))
    return ServerStateFactory(options, cluster.tasks, server, control)


def train(shards, pushes):
    def say(kind, *fields, arrays=()):
        shards.heard(b"0", kind(1, 0, 1, *fields), list(arrays), lambda message, arrays: None)

    say(Attach, KEY[0])
    config = keras.saving.serialize_keras_object(SGD)
    say(CreateShard, KEY[0], HELD, config, True, ((),), arrays=[np.zeros(2, np.float32)])
    say(AttachTable, "users", 2, "float32", InitialRows(), RowPolicy(), keras.optimizers.serialize(SGD))
    version = shards[KEY].ledger.version
    for sequence in range(version, version + pushes):
        say(Push, sequence, sequence, sequence, 1.0, arrays=[np.ones(2, np.float32)])
    return shards[KEY].store.vectors()[0].tolist()


def test_shard_gets_workers_and_synchronization_of_the_job():
    shards = template().leading()
    train(shards, 1)
    ledger = shards[KEY].ledger
    assert ledger.awaited == {1}
    assert ledger.synchronization == BoundedStaleness(3)


@pytest.mark.parametrize("server", [0, 1])
def test_the_first_server_deals_batches(server):
    assert (template(server).following().deals is not None) == (server == 0)


def test_leading_server_writes_and_restores_snapshots(tmp_path):
    first = template(folder=tmp_path).leading()
    assert train(first, 3) == [-3, -3]
    first.close()
    again = template(folder=tmp_path).leading()
    assert train(again, 1) == [-4, -4]
    assert again[KEY].is_restored
    assert again.tables.served("users").is_restored


def test_following_server_writes_snapshots_only_after_takeover(tmp_path):
    made = template(folder=tmp_path)
    shards = made.following()
    train(shards, 2)
    shards.close()
    assert not list(tmp_path.iterdir())
    made.take_over(shards)
    train(shards, 1)
    shards.close()
    again = template(folder=tmp_path).leading()
    assert train(again, 0) == [-3, -3]
    assert again.tables.served("users").is_restored


def test_snapshots_of_other_models_are_logged(tmp_path, caplog):
    (tmp_path / "Adam-2").mkdir()
    train(template(folder=tmp_path).leading(), 1)
    assert (
        f"{tmp_path} has snapshots of other models only (Adam-2): the model SGD-1 starts without a snapshot"
        in caplog.text
    )


def test_host_server_awaits_its_workers_and_writes_no_snapshots(tmp_path):
    """The tasks are the chief, a worker, a root and the server of their host."""
    cluster = cluster_of("ps", chief=1, worker=1, ps=2)
    options = Arguments(BoundedStaleness(3, DropBeyond(1)), servers=PerHost(Synchronous(), snapshots=tmp_path))
    control = SimpleNamespace(job="job", present={})
    root, host = (ServerStateFactory(options, cluster.tasks, server, control) for server in range(2))
    host.tell = lambda event: None
    shards = [made.leading() for made in (root, host)]
    for shard in shards:
        shard.heard(b"0", Attach(1, 0, 1, KEY[0]), [], lambda message, arrays: None)
    ledgers = [shard[KEY].ledger for shard in shards]
    assert [ledger.synchronization for ledger in ledgers] == [BoundedStaleness(3, DropBeyond(1)), Synchronous()]
    assert [ledger.synchronization.late for ledger in ledgers] == [DropBeyond(1), Unscaled()]
    assert [ledger.awaited for ledger in ledgers] == [{3}, {1}]
    assert [shard[KEY].snapshots is not None for shard in shards] == [True, False]
    assert shards[1][KEY].above.has_chief
