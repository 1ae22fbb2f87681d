"""The strategy in a process alone; `tests/multiprocess/test_parameter_server.py` has jobs with servers."""

import keras
import numpy as np
import pytest

from tfdist.strategies import at_work, parameter_server
from tfdist.strategies.abilities import UpdatesOnServers
from tfdist.strategies.parameter_server import ParameterServerStrategy


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def trained(strategy=None):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")

    def model():
        made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        made.compile("adam", "mse")
        return made

    if strategy is None:
        made = model()
    else:
        with strategy.scope():
            made = model()
    history = made.fit(x, x[:, :1], epochs=3, batch_size=16, shuffle=False, verbose=0)
    return made.get_weights(), history.history["loss"]


def test_without_servers_a_process_trains_as_usual():
    weights, losses = trained()
    own, own_losses = trained(ParameterServerStrategy())
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    for one, other in zip(own, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_without_servers_no_seam_is_at_work():
    strategy = ParameterServerStrategy()
    assert at_work.of_strategy(strategy, UpdatesOnServers) is None
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}


@pytest.mark.parametrize(
    ("optimizer", "servers", "words"),
    [
        ({"use_ema": True}, 1, "set use_ema=False"),
        ({"global_clipnorm": 1.0}, 2, "which 2 parameter servers do not have yet: use one server"),
    ],
)
def test_what_servers_cannot_do_is_refused(optimizer, servers, words):
    with pytest.raises(ValueError, match=words):
        parameter_server._check(keras.optimizers.SGD(**optimizer), [keras.Variable([1.0])], servers)


def test_constraints_are_refused():
    layer = keras.layers.Dense(2, kernel_constraint="non_neg")
    layer.build((None, 3))
    with pytest.raises(ValueError, match=r"got one on dense.*/kernel"):
        parameter_server._check(keras.optimizers.SGD(), layer.trainable_variables, 1)


def test_what_servers_can_do_is_not():
    optimizer = keras.optimizers.Adam(clipnorm=1.0, weight_decay=0.1)
    parameter_server._check(optimizer, [keras.Variable([1.0])], 2)
    parameter_server._check(keras.optimizers.Adam(global_clipnorm=1.0), [keras.Variable([1.0])], 1)
