"""Messages about batches arrive as they were sent."""

import numpy as np
import pytest

from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    Bring,
    Brought,
    Dealt,
    LeaveEpoch,
    Merged,
    MergeMetrics,
    NoBatch,
    Planned,
    Skip,
    Take,
)
from tfdist.parameter_server.protocol.messages import FROM_SERVER, FROM_WORKER

OF = 1, 0, 2**62


@pytest.mark.parametrize(
    "message",
    [
        BeginEpoch(*OF, 0, 3, 100, 32, 2**63 - 1),
        BeginEpoch(*OF, 0, 3, None, 1, None, brings=True),
        Bring(*OF, 0, 3, 7),
        Bring(*OF, 0, 3, 7, is_end=True, failure="no such file"),
        Take(*OF, 0, 3, 9, is_idle=True),
        Skip(*OF, 2**60),
        MergeMetrics(*OF, 0, 3, ("sum", "max")),
        LeaveEpoch(*OF),
    ],
)
def test_workers_messages_survive_encoding(message):
    part = np.frombuffer(b"a batch", np.uint8)
    found, (array,) = FROM_WORKER.decode([bytes(frame) for frame in FROM_WORKER.encode(message, [part])])
    assert found == message
    np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize(
    "message", [Planned(1, None), Dealt(1, 2**60, 0, 32), Brought(1, None), Brought(1, 8), NoBatch(1, True), Merged(1)]
)
def test_servers_messages_survive_encoding(message):
    assert FROM_SERVER.decode(FROM_SERVER.encode(message))[0] == message
