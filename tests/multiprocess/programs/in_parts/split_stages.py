"""`PipelineStrategy(mesh=…)` with split layers against plain Keras; a check for each name in TEST_CASES.

On two processes each has both stages, and on four there are two pipelines of two processes.
"""

import os

import as_plain
import keras
import numpy as np
import pytest
import tensorflow as tf
from as_plain import (
    FOLDER,
    IMAGES,
    TOKENS,
    X,
    Y,
    accumulated,
    assert_as_plain,
    averages,
    compiled,
    fit,
    scaled,
    size,
)
from checking import run_checks
from comparing import assert_close
from split_models import images, kinds, pair, words

import tfdist
from tfdist.strategies.divided import weight_parts

MESHES = {2: {"model": 2}, 4: {"stage": 2, "model": 2}, 8: {"data": 2, "stage": 2, "model": 2}}
layers = keras.layers


def strategy(**arguments):
    given = {"stages": 2, "micro_batches": 2, "devices": ["CPU:0"], "mesh": tfdist.Mesh(**MESHES[size]), **arguments}
    return tfdist.PipelineStrategy(**given)


def tied():
    """Two stages call the same layer; the norms of its gradients count once."""
    of = kinds()
    again = of.columns(6, "tanh")
    outputs = inputs = keras.Input((7,))
    for layer in (layers.Dense(6, "relu"), again, of.rows(6, "tanh"), again, layers.Dense(2)):
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def stopped():
    """Two stages call the same layer, which gets no gradient from its second call."""
    of = kinds()
    again = of.columns(6, "tanh")
    inputs = keras.Input((7,))
    hidden = of.rows(6, "tanh")(again(layers.Dense(6, "relu")(inputs)))
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([hidden, keras.ops.stop_gradient(again(hidden))])))


def frozen():
    model = pair()
    model.layers[0].trainable = False
    return model


def convolutions():
    return images(normalized=False)


def models():
    assert_as_plain(pair, X, strategy())
    assert_as_plain(convolutions, IMAGES, strategy(schedule="gpipe"))
    assert_as_plain(frozen, X, strategy())
    assert_as_plain(words, TOKENS, strategy(schedule="gpipe"))
    if size == 2:  # each process has both stages
        assert_as_plain(pair, X, strategy(devices=["CPU:0", "CPU:1"]), averages)


def schedules():
    for how in ({"schedule": "zero_bubble"}, {"schedule": "interleaved"}, {"recompute": True}):
        assert_as_plain(pair, X, strategy(**how))


def optimizers():
    made = strategy()
    for optimizer in (averages, scaled, clipped):
        assert_as_plain(pair, X, made, optimizer)
    assert_as_plain(tied, X, made, averages)
    assert_as_plain(stopped, X, made)


def clipped():
    return keras.optimizers.Adam(0.01, clipnorm=0.05)


def copies():
    """Two processes have each part, and each process has both stages."""
    assert_as_plain(pair, X, strategy(mesh=tfdist.Mesh(data=2, model=size // 2)), clipped)


def accumulation():
    assert_as_plain(pair, X, strategy(), accumulated, 3)


def few():
    """Batches with fewer rows than micro-batches, and than pipelines."""
    model, plain = compiled(pair, made=strategy()), compiled(pair)
    for each in (model, plain):
        for rows in (3, 1):
            each.fit(X[:rows], Y[:rows], batch_size=8, shuffle=False, verbose=0)
    assert_close(model, plain.get_weights())


def ways():
    as_plain.assert_as_plain_in_all_ways(strategy, pair)


def files():
    as_plain.assert_files_as_plain(strategy, pair)


def restarted():
    as_plain.assert_restarts_as_plain(strategy, pair)


def assigned():
    """`set_weights` gives each process its parts of the values."""
    model, other = compiled(pair, made=strategy()), compiled(pair, made=strategy())
    fit(model)
    other.set_weights(model.get_weights())
    assert_close(other, model.get_weights(), 0)


def moved():
    """A file of a model in stages loads where layers are split otherwise, and the other way round."""
    path = os.path.join(FOLDER, "moved.keras")
    model = compiled(pair, made=strategy())
    fit(model)
    model.save(path)
    tfdist.barrier()
    with tfdist.AllReduceStrategy(devices=["CPU:0"], mesh=tfdist.Mesh(data=size // 2, model=2)).scope():
        other = keras.models.load_model(path)
    for each in (model, other):
        fit(each, epochs=1)
    assert_close(other, model.get_weights())
    other.save(path)
    tfdist.barrier()
    with strategy().scope():
        again = keras.models.load_model(path)
    for each in (other, again):
        fit(each, epochs=1)
    assert_close(again, other.get_weights())


def dealt():
    """Each process keeps a part of a split layer's weights and of their slots, and nothing of other stages."""
    model = assert_as_plain(pair, X, strategy(), averages)
    kept = [weight_parts.of(weight) for weight in (*model.trainable_weights, *model.optimizer.variables)]
    sizes = [int(np.prod(part.part.shape)) for part in kept if part is not None]
    total = int(tfdist.all_reduce(tf.constant(sum(sizes)), "sum"))
    split = [weight for layer in model.layers if hasattr(layer, "splits") for weight, _ in layer.splits()]
    whole = sum(int(np.prod(weight.shape)) for weight in split)
    assert total == 4 * whole * MESHES[size].get("data", 1)


def refused():
    with pytest.raises(TypeError, match=r"PipelineStrategy\(mesh=…\) must be a tfdist.Mesh, .*; got 2"):
        strategy(mesh=2)
    with pytest.raises(ValueError, match=rf"is for 5 processes \(model=5\), and {size} train together"):
        strategy(mesh=tfdist.Mesh(model=5))
    with pytest.raises(ValueError, match=rf"mesh=.*stage={size}.* does not fit stages=3.* the mesh's axis 'stage' or"):
        strategy(stages=3, mesh=tfdist.Mesh(stage=size))
    with pytest.raises(ValueError, match=r"give their number as an axis, such as Mesh.*, and not as data=2"):
        strategy(data=2)
    with pytest.raises(ValueError, match="does not work with compression="):
        strategy(compression=tfdist.compression.Int8())
    with (
        tfdist.PipelineStrategy(stages=1, micro_batches=2, data=size, devices=["CPU:0"]).scope(),
        pytest.raises(ValueError, match=r"the strategy has no mesh: add PipelineStrategy\(mesh=tfdist.Mesh\(stage"),
    ):
        pair()
    with strategy().scope(), pytest.raises(ValueError, match="split over the axis 'stage', along which the stages"):
        keras.Sequential([layers.Input((7,)), kinds().columns(4, mesh_axis="stage")])
    keras.backend.clear_session()  # names of layers begin anew
    with pytest.raises(ValueError, match=r"cuts=\['activation'\].*: the features that dense leaves are on several"):
        compiled(pair, made=strategy(cuts=["activation"]))
    with pytest.raises(ValueError, match=r"export: no process has all of the weight .*kernel\. Save the model"):
        compiled(pair, made=strategy()).export(FOLDER)
    with pytest.raises(ValueError, match="the optimizer lamb may look at whole weights"):
        compiled(pair, keras.optimizers.Lamb, strategy())


def alone():
    as_plain.call_alone(strategy, pair, lambda model: model.get_weights())


def endless():
    as_plain.train_endlessly(strategy, pair)


tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
