"""The strategy on one process; `tests/multiprocess/test_gossip.py` has it on several."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.compression import DeepGradientCompression, FewerWorkers, TopK
from tfdist.parameter_server import Asynchronous, BoundedStaleness, SoftSync, Synchronous


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"topology": "torus"}, ValueError, "one of 'ring', .* got 'torus'"),
        ({"topology": [[0, 1], [1, 0]]}, ValueError, "a graph of 2 processes, but 1 train"),
        ({"sync_every": 0}, ValueError, "got sync_every=0"),
        ({"synchronization": "asynchronous"}, TypeError, "must be Synchronous.* got 'asynchronous'"),
        ({"synchronization": SoftSync(2)}, ValueError, r"no server, which SoftSync\(n=2\) needs"),
        ({"synchronization": Synchronous(backup_workers=1)}, ValueError, "no server"),
        ({"overlap": 1}, TypeError, "must be True or False; got 1"),
        ({"overlap": True, "synchronization": Asynchronous()}, ValueError, r"which\s+overlaps anyway"),
        ({"compression": TopK(0.1), "synchronization": Asynchronous()}, ValueError, r"needs Synchronous\(\)"),
        ({"compression": TopK(0.1), "topology": "random"}, ValueError, "neighbours that are the same in all rounds"),
        ({"synchronization": BoundedStaleness(1), "topology": "exponential"}, ValueError, "BoundedStaleness needs"),
        ({"compression": 8}, TypeError, "8"),
        ({"compression": FewerWorkers(1)}, ValueError, "gossip cannot compress with FewerWorkers"),
        ({"compression": DeepGradientCompression(0.01)}, ValueError, "gossip cannot compress with DeepGradient"),
        ({"consensus_rate": "a", "compression": TopK(0.1)}, ValueError, "at most 1; got 'a'"),
        ({"consensus_rate": True, "compression": TopK(0.1)}, ValueError, "at most 1; got True"),
        ({"group": [0, 1]}, TypeError, r"GossipStrategy\(group=…\) must be a tfdist.Group; got \[0, 1\]"),
        ({"consensus_rate": 0.5}, ValueError, "needs compression="),
        ({"consensus_rate": 0.0, "compression": TopK(0.1)}, ValueError, "above 0 and at most 1; got 0.0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdist.GossipStrategy(**arguments)


@pytest.mark.parametrize("synchronization", [None, BoundedStaleness(2), Asynchronous()])
def test_single_process_trains_as_under_all_reduce(synchronization):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")

    def trained(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        model.set_weights([np.ones([3, 1]), np.zeros(1)])
        model.fit(x, x.sum(axis=1), batch_size=5, epochs=2, shuffle=False, verbose=0)
        return model

    gossip = tfdist.GossipStrategy(synchronization=synchronization)
    model = trained(gossip)
    for weight, other in zip(model.get_weights(), trained(tfdist.AllReduceStrategy()).get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)
    assert gossip.distance(model) == 0
    gossip.settle(model)
