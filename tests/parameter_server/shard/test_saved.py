"""What a shard takes over from its snapshot."""

import threading

import keras
import numpy as np

from tests.parameter_server.shard.talk import HELD, ZEROS, Talk
from tfdist.parameter_server.options.synchronization import Asynchronous, SoftSync
from tfdist.parameter_server.protocol.messages import AssignValues, CreateShard
from tfdist.parameter_server.protocol.state import ShardProgress
from tfdist.parameter_server.snapshots import sharded
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import ShardState


def shot(folder, mode=Asynchronous(), created=False, workers=1):  # noqa: B008
    return Talk(mode, workers, created=created, snapshots=Snapshots(folder, 0, 1, 60.0))


def test_a_server_goes_on_from_its_snapshot(tmp_path):
    """Any worker may describe the model. What had not been applied is not known as counted."""
    first = shot(tmp_path, SoftSync(1), created=True, workers=2)
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        first.push(worker, clock)
    first.shard.close()
    again = shot(tmp_path, SoftSync(1), workers=2)
    again.create(keras.optimizers.SGD(1.0), arrays=None, worker=1)
    assert again.bias == -1
    assert again.shard.ledger.version == 1
    again.push(1, 0)
    assert again.bias == -1, "the snapshot has it"
    again.push(0, 1)
    again.push(1, 1)
    assert again.bias == -2


def test_pushes_are_counted_once_over_a_restart(tmp_path):
    """Workers push again what was counted and is not in the snapshot, as it waited for an update."""
    first = shot(tmp_path, SoftSync(1), created=True, workers=2)
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        first.push(worker, clock)
    assert first.shard.ledger.counted == {0: 2, 1: 1}
    first.shard.close()
    again = shot(tmp_path, SoftSync(1), workers=2)
    nonsense = {"class_name": "NoSuch", "config": {}}
    assert "cannot be made" in again.say(CreateShard, 0, 1, "model", HELD, nonsense, False).why
    again.create(keras.optimizers.SGD(1.0), arrays=None)
    assert again.shard.ledger.counted == {0: 1, 1: 1}
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        again.push(worker, clock)
    counted = {worker_report.number: worker_report.counted for worker_report in again.shard.report("model", 0).workers}
    assert counted == {0: 2, 1: 1}


def test_last_snapshot_includes_updates_during_another_write(tmp_path, monkeypatch):
    write, may_go_on = sharded.write, threading.Event()

    def slow(*arguments):
        assert may_go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(sharded, "write", slow)
    first = shot(tmp_path, created=True)  # the first values are being written
    first.push(0, 0)
    threading.Timer(0.1, may_go_on.set).start()
    first.shard.close()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0))
    assert again.shard.ledger.version == 1


def test_put_values_are_in_the_next_snapshot(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    first.say(AssignValues, 0, 1, arrays=[np.full(15, 5.0, np.float32)])
    first.shard.close()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0))
    assert again.bias == 5


def test_values_after_fit_are_what_was_assigned_before_a_restart(tmp_path):
    average = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    first = Talk(optimizer=average, snapshots=Snapshots(tmp_path, 0, 1, 60.0))
    first.shard.snapshots.wait()
    first.push()
    first.say(AssignValues, 0, 1, arrays=[np.full(15, 3.0, np.float32)])
    first.shard.close()
    again = shot(tmp_path)
    again.create(average, arrays=None)
    again.pull(what="final")
    np.testing.assert_array_equal(again.answers[again.number][0][1][0], np.full(15, 3.0))


def test_the_first_snapshot_is_of_the_first_values(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0), arrays=[zeros + 5 for zeros in ZEROS])
    assert again.bias == 0, "what the chief has counts for nothing then"


def test_snapshot_of_another_model_is_refused(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    state = ShardState("other", {}, {}, (), ShardProgress(3))
    sharded.write(tmp_path, 0, 1, state)
    refused = shot(tmp_path, created=False).create(keras.optimizers.SGD(1.0))
    assert "are of another model" in refused.why
