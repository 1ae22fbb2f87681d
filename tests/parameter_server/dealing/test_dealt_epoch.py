"""One epoch of a dealer; `test_dealer.py` has what workers see of it."""

import json
from collections import deque

from tfdist.parameter_server.dealing.dealt_epoch import Batch, DealtEpoch
from tfdist.parameter_server.dealing.plan import Plan


def test_batches_to_deal_again_come_before_new_ones():
    epoch = DealtEpoch(Plan(5, 2, None), dealt=2, again=deque([1, 0]))
    assert [epoch.next() for _ in range(4)] == [1, 0, 2, None]


def test_last_batch_ends_with_the_samples_and_stream_has_none():
    assert DealtEpoch(Plan(5, 2, None), out={7: (0, 2)}).batch(7) == Batch(7, 4, 5)
    stream = DealtEpoch(Plan(None, 1, None), out={7: (0, 2)}, brought=3, content={2: "third"})
    assert stream.batch(7) == Batch(7, 2, 3, "third")


def test_epoch_is_committed_when_nothing_is_out_or_left():
    epoch = DealtEpoch(Plan(2, 2, None), dealt=1)
    assert epoch.is_committed
    epoch.again.append(0)
    assert not epoch.is_committed
    stream = DealtEpoch(Plan(None, 1, None))
    assert not stream.is_committed, "it may bring more"
    stream.has_ended = True
    assert stream.is_committed


def test_state_counts_batches_of_workers_as_not_dealt():
    epoch = DealtEpoch(Plan(9, 2, 3), dealt=4, again=deque([1]), out={7: (2, 3)}, members={2, 0})
    restored = DealtEpoch.restored(json.loads(json.dumps(epoch.state([0]))))
    assert restored == DealtEpoch(Plan(9, 2, 3), dealt=4, again=deque([1, 3, 0]), members={0, 2})
