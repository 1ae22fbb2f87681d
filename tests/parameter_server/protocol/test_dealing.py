"""Messages about batches arrive as they were sent."""

import numpy as np
import pytest

from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    BringBatch,
    DealtBatch,
    EpochPlanned,
    LeaveEpoch,
    MergedMetrics,
    MergeMetrics,
    NoBatch,
    RoomForBatch,
    SkipBatch,
    TakeBatch,
)
from tfdist.parameter_server.protocol.messages import FROM_SERVER, FROM_WORKER

OF = 1, 0, 2**62


@pytest.mark.parametrize(
    "message",
    [
        BeginEpoch(*OF, 0, 3, 100, 32, 2**63 - 1, True),
        BeginEpoch(*OF, 0, 3, None, 1, None, brings=True),
        BringBatch(*OF, 0, 3, 7),
        BringBatch(*OF, 0, 3, 7, is_end=True, failure="no such file"),
        TakeBatch(*OF, 0, 3, 9, is_idle=True),
        SkipBatch(*OF, 2**60),
        MergeMetrics(*OF, 0, 3, ("sum", "max"), ("loss", "auc")),
        LeaveEpoch(*OF),
    ],
)
def test_workers_messages_survive_encoding(message):
    part = np.frombuffer(b"a batch", np.uint8)
    decoded, (array,) = FROM_WORKER.decode([bytes(frame) for frame in FROM_WORKER.encode(message, [part])])
    assert decoded == message
    np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize(
    "message",
    [
        EpochPlanned(1, None),
        DealtBatch(1, 2**60, 0, 32),
        RoomForBatch(1, None),
        RoomForBatch(1, 8),
        NoBatch(1, True),
        MergedMetrics(1),
    ],
)
def test_servers_messages_survive_encoding(message):
    assert FROM_SERVER.decode(FROM_SERVER.encode(message))[0] == message
