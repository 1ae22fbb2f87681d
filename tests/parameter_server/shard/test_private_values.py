import pytest

from tfdist.parameter_server import Asynchronous
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.private_values import PrivateValues


def test_private_values_are_opened_by_nobody_and_changed_by_nobody_else():
    values, ledger = PrivateValues(), Ledger(Asynchronous())
    with pytest.raises(ValueError, match="no shared memory"):
        values.opened(1)
    values.settle(ledger)
    assert ledger == Ledger(Asynchronous())
