"""Messages about tables arrive as they were sent, and wrong ones do not decode."""

import numpy as np
import pytest

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.messages import FROM_SERVER, FROM_WORKER
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    UpdateRows,
)
from tfdist.parameter_server.protocol.wire import InvalidMessageError

OF = 1, 0, 5, "users-0"
INITIAL = InitialRows("normal", seed=2**64 - 1)
ATTACH = AttachTable(*OF, 4, "float32", INITIAL, RowPolicy(2, max_rows=9), {"class_name": "SGD", "config": {}})


@pytest.mark.parametrize(
    "message", [ATTACH, Lookup(*OF, 3, True), UpdateRows(*OF, 3, 0.1), AssignRows(*OF, True), ExportTable(*OF)]
)
def test_workers_messages_survive_encoding(message):
    keys = np.array([1, -(2**63)], np.int64)
    decoded, (array,) = FROM_WORKER.decode([bytes(frame) for frame in FROM_WORKER.encode(message, [keys])])
    assert decoded == message
    np.testing.assert_array_equal(array, keys)


@pytest.mark.parametrize("message", [TableAttached(1, 7), Rows(1, 8)])
def test_servers_messages_survive_encoding(message):
    assert FROM_SERVER.decode(FROM_SERVER.encode(message))[0] == message


def test_invalid_row_policy_is_refused():
    frames = FROM_WORKER.encode(ATTACH)
    assert b"admit_after\x02" in frames[0]
    with pytest.raises(InvalidMessageError, match="admit_after"):
        FROM_WORKER.decode([frames[0].replace(b"admit_after\x02", b"admit_after\x00")])
