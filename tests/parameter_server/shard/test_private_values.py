import pytest

from tfdist.parameter_server import Asynchronous
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.private_values import PrivateValues


def test_private_values_cannot_be_opened_as_shared_memory():
    values, ledger = PrivateValues(), Ledger(Asynchronous())
    with pytest.raises(ValueError, match="no shared memory"):
        values.opened(1)
    values.settle(ledger)
    assert ledger == Ledger(Asynchronous())
