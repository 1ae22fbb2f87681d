"""What servers cannot do is refused before training; `test_keras_servers.py` has training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.model_parallel.executed import executed, places
from tests.strategies.served import Served, served
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import Gradients, Hogwild
from tfdist.strategies.servers.server_extended import _check


def check(optimizer, servers, clips, variable=None):
    _check(optimizer, [keras.Variable([1.0]) if variable is None else variable], servers, clips)


@pytest.mark.parametrize(
    ("options", "clips"),
    [({"global_clipnorm": 1.0}, False), ({"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}, True)],
)
def test_norms_of_averages_on_several_servers_are_refused(options, clips):
    with pytest.raises(ValueError, match="is divided over 2 parameter servers: use one server"):
        check(keras.optimizers.SGD(**options), 2, clips)
    check(keras.optimizers.SGD(**options), 1, clips)


class OwnClipping(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return grads


def test_own_clipping_on_several_servers_is_refused():
    with pytest.raises(ValueError, match="the optimizer own clips gradients in a method of its own"):
        check(OwnClipping(name="own"), 2, True)
    check(OwnClipping(name="own"), 1, True)


def test_float8_is_refused():
    variable = keras.Variable([1.0], name="scale")
    variable.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="float8 training; got scale"):
        check(keras.optimizers.SGD(), 1, True, variable)


def test_supported_optimizer_options_are_accepted():
    check(keras.optimizers.Adam(clipnorm=1.0, weight_decay=0.1, use_ema=True), 2, True)
    check(keras.optimizers.Adam(global_clipnorm=1.0), 2, True)


@pytest.mark.parametrize(("data", "expected"), [("own", [[0, 2, 4], [1, 3]]), ("shared", [[0, 1, 2, 3, 4]] * 2)])
def test_a_function_makes_the_shard_of_a_worker(data, expected):
    def sharded(context):
        assert context.get_per_replica_batch_size(6) == 6
        return tf.data.Dataset.range(5).shard(context.num_input_pipelines, context.input_pipeline_id)

    with served(2, data=data) as strategies:
        made = [strategy.distribute_datasets_from_function(sharded) for strategy in strategies]
    assert [list(map(int, dataset)) for dataset in made] == expected


@pytest.mark.parametrize("pushes", [Gradients(), Gradients(prefetch=1), Hogwild()])
def test_host_calls_are_on_the_host_and_the_model_is_not(pushes):
    """`CPU:1` stands in for a GPU."""
    with served(pushes=pushes) as (first,):
        strategy = Served(first.servers, 0, Arguments(pushes=pushes), before=first, device="CPU:1")
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 4)])
            model.add(keras.layers.Flatten())
            model.add(keras.layers.Dense(1))
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        x = np.arange(36).reshape(18, 2) % 5
        operations = executed(lambda: model.fit(x, x[:, :1], batch_size=6, validation_data=(x, x[:, :1]), verbose=0))
    assert set(places(operations, "PyFunc")) == {"CPU:0"}, places(operations, "PyFunc")
    assert set(places(operations, "MatMul")) == {"CPU:1"}, places(operations, "MatMul")
