"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import pytest

import tfdist
from tests.callbacks.fitting import fit


def test_root_rank_out_of_range_raises():
    with pytest.raises(ValueError, match="root_rank from 0 to 0; got 1"):
        fit(tfdist.callbacks.BroadcastVariables(root_rank=1))
