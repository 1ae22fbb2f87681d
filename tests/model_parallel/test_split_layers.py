"""Split layers on ranks that are threads; `tests/multiprocess/test_split_layers.py` trains them on processes."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, RankedShards
from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense
from tfdist.private.keras import backend
from tfdist.runtime.mesh import Mesh
from tfdist.strategies.all_reduce.mesh_extended import MeshExtended
from tfdist.strategies.divided import weight_parts

INPUTS = np.random.default_rng(0).normal(size=(5, 3, 6)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 9, (5, 3))
SHARES = (slice(0, 2), slice(2, 5))
LAYERS = {
    "columns": (ColumnParallelDense, keras.layers.Dense, (4, "softmax"), INPUTS, 2),
    "rows": (RowParallelDense, keras.layers.Dense, (4, "tanh"), INPUTS, 1),
    "embedding": (ParallelEmbedding, keras.layers.Embedding, (9, 4), IDS, 1),
}


class Pair(keras.Model):
    """Two layers between which units stay in parts, in a model that is built by its first call."""

    def __init__(self):
        super().__init__()
        self.first = ColumnParallelDense(8, "tanh", gather_output=False)
        self.second = RowParallelDense(2, input_is_parallel=True)

    def call(self, inputs):
        return self.second(self.first(inputs))


def meshed(group, **axes):
    return RankedShards(group, functools.partial(MeshExtended, Mesh(**axes or {"model": group.size}), None))


@pytest.mark.parametrize("name", LAYERS)
def test_each_process_gets_its_rows_of_the_whole_layer(ranks, name):
    """And its part of the gradient of the whole layer's weight."""
    split, whole, arguments, inputs, parts = LAYERS[name]

    def work(group):
        with meshed(group).scope():
            layer = split(*arguments)
            layer.build(inputs.shape)
        assert sum(weight_parts.of(weight) is not None for weight in layer.weights) == parts
        with tf.GradientTape() as tape:
            outputs = layer(tf.constant(inputs[SHARES[group.rank]]))
            loss = tf.reduce_sum(outputs**2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, layer.weights[0]))
        return outputs.numpy(), layer.get_weights(), gradient.numpy(), weight_parts.of(layer.weights[0]).index

    plain = whole(*arguments)
    plain.build(inputs.shape)
    for share, (outputs, weights, gradient, index) in zip(SHARES, ranks(2)(work), strict=True):
        plain.set_weights(weights)
        with tf.GradientTape() as tape:
            expected = plain(tf.constant(inputs))
            loss = tf.reduce_sum(expected**2)
        np.testing.assert_allclose(outputs, expected[share], rtol=1e-5, atol=1e-6)
        all_of_it = tf.convert_to_tensor(tape.gradient(loss, plain.weights[0])).numpy()
        np.testing.assert_allclose(gradient, all_of_it[index], rtol=1e-4, atol=1e-5)


def test_a_pair_leaves_the_units_in_parts_between(ranks):
    """Its mask has the rows of all processes there."""

    def work(group):
        with meshed(group).scope():
            first = ColumnParallelDense(8, "relu", gather_output=False)
            second = RowParallelDense(2, input_is_parallel=True)
            model = keras.Sequential([keras.layers.Masking(), first, keras.layers.Activation("tanh"), second])
            model.build((None, 3, 6))
        inputs = tf.constant(INPUTS[SHARES[group.rank]])
        between = first(model.layers[0](inputs))
        assert between.shape == (5, 3, 4)
        assert between._keras_mask.shape == (5, 3)
        outputs = model(inputs)
        assert outputs._keras_mask.shape == inputs.shape[:2]
        return outputs.numpy(), model.get_weights(), first.output.shape, second.kernel.shape

    plain = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Activation("tanh"), keras.layers.Dense(2)])
    plain.build((None, 3, 6))
    for share, (outputs, weights, between, kernel) in zip(SHARES, ranks(2)(work), strict=True):
        plain.set_weights(weights)
        np.testing.assert_allclose(outputs, plain(INPUTS)[share], rtol=1e-5, atol=1e-6)
        assert between == (None, 3, 4)
        assert kernel == (8, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_computed_by_one_process_alone(ranks, name):
    split, _, arguments, inputs, _ = LAYERS[name]

    class Sub(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = split(*arguments)

        def call(self, x):
            return self.layer(x)

    def work(group):
        with meshed(group).scope():
            layer, model = split(*arguments), Sub()
            layer.build(inputs.shape)
            model.layer.build(inputs.shape)
        if group.rank:
            return None
        given = keras.Input(inputs.shape[1:], dtype=str(inputs.dtype))
        return layer(given).shape, backend.compute_output_spec(model.call, given).shape

    assert ranks(2)(work)[0] == ((None, 3, 4), (None, 3, 4))


def test_shapes_are_computed_before_there_are_weights(ranks):
    def work(group):
        with meshed(group).scope():
            model = Pair()
            model(keras.Input((3, 6)))  # shapes alone, as `fit` does first
        outputs = model(INPUTS).numpy()
        assert [tuple(weight.shape) for weight in model.weights] == [(6, 8), (8,), (8, 2), (2,)]
        return model.get_weights(), outputs

    plain = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    plain.build((None, 3, 6))
    for weights, outputs in ranks(2)(work):
        plain.set_weights(weights)
        np.testing.assert_allclose(outputs, plain(INPUTS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_mesh_they_are_layers_of_keras(name, tmp_path):
    """With the same names of their own and in files."""
    split, whole, arguments, inputs, _ = LAYERS[name]
    models = []
    for of in (whole, split):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        models.append(keras.Sequential([keras.Input(inputs.shape[1:], dtype=str(inputs.dtype)), of(*arguments)]))
    plain, model = models
    assert [layer.name for layer in model.layers] == [layer.name for layer in plain.layers]
    np.testing.assert_array_equal(model(inputs), plain(inputs))
    model.save_weights(tmp_path / "split.weights.h5")
    plain.set_weights([value + 1 for value in plain.get_weights()])
    plain.load_weights(tmp_path / "split.weights.h5")
    np.testing.assert_array_equal(model(inputs), plain(inputs))
    model.save(tmp_path / "split.keras")
    loaded = keras.models.load_model(tmp_path / "split.keras")
    assert type(loaded.layers[-1]) is split
    np.testing.assert_array_equal(loaded(inputs), model(inputs))
    assert "tfdist" in loaded.to_json()


def test_configuration_is_kept():
    first = ColumnParallelDense(4, "relu", mesh_axis="m", gather_output=False, use_bias=False)
    copy = ColumnParallelDense.from_config(first.get_config())
    assert (copy.units, copy.mesh_axis, copy.gather_output, copy.use_bias) == (4, "m", False, False)
    second = RowParallelDense.from_config(RowParallelDense(4, input_is_parallel=True).get_config())
    assert (second.input_is_parallel, second.mesh_axis) == (True, "model")
    assert ParallelEmbedding.from_config(ParallelEmbedding(5, 4, mesh_axis="m").get_config()).mesh_axis == "m"


def test_a_part_of_a_pair_is_built_on_another_number_of_processes(ranks):
    """Files have the shape of inputs with all features."""

    def work(group):
        with meshed(group).scope():
            layer = RowParallelDense(2, input_is_parallel=True)
            layer.build((None, 4))
            config = layer.get_build_config()
            other = RowParallelDense(2, input_is_parallel=True)
            other.build_from_config(config)
        return config["input_shape"], layer.kernel.shape, other.kernel.shape

    found = ranks(2)(work)[0]
    assert found == ((None, 8), (8, 2), (8, 2))
    alone = RowParallelDense(2, input_is_parallel=True)
    alone.build_from_config({"input_shape": (None, 8)})
    assert alone.kernel.shape == (8, 2)


def test_what_cannot_be_split_is_refused(ranks):
    def work(group):
        with meshed(group).scope():
            with pytest.raises(ValueError, match=r"Dense d: 5 units do not divide over the 2 .*; 4 or 6 would"):
                ColumnParallelDense(5, name="d").build((None, 3))
            with pytest.raises(ValueError, match=r"has no axis 'tensor'; it has 'model'"):
                ColumnParallelDense(4, mesh_axis="tensor").build((None, 3))
            with pytest.raises(ValueError, match="a constraint looks at the whole weight 'kernel'"):
                ColumnParallelDense(4, kernel_constraint="non_neg").build((None, 3))
            layer = ColumnParallelDense(4)
            layer.build((None, 3))
            for call in (lambda: layer.enable_lora(2), lambda: layer.quantize("int8")):
                with pytest.raises(ValueError, match="needs the whole layer, of which each process has a part"):
                    call()
            with pytest.raises(TypeError, match=r"takes dense inputs; call tf.sparse.to_dense"):
                layer.call(tf.sparse.from_dense(INPUTS[0, :, :3]))
        with Ranked(group).scope(), pytest.raises(ValueError, match=r"PipelineStrategy\(mesh=tfdist.Mesh\(…, model=…"):
            ColumnParallelDense(4).build((None, 3))

    ranks(2)(work)


def test_activations_of_all_units_need_all_units():
    with pytest.raises(ValueError, match="the activation softmax acts on all of them; use gather_output=True"):
        ColumnParallelDense(4, "softmax", gather_output=False)


def test_units_of_one_process_have_no_activity_regularizer():
    with pytest.raises(ValueError, match="activity_regularizer looks at those of one; use gather_output=True"):
        ColumnParallelDense(8, gather_output=False, activity_regularizer="l2")


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_a_frozen_layer_of_a_pair_is_split_as_the_other_one(ranks, frozen):
    def work(group):
        with meshed(group).scope():
            model = Pair()
            getattr(model, frozen).trainable = False
            outputs = model(INPUTS[:3])
        return outputs.shape, [tuple(weight_parts.of(part.kernel).part.shape) for part in model.layers]

    assert ranks(2)(work) == [((3, 3, 2), [(6, 4), (4, 2)])] * 2


@pytest.mark.parametrize("made", [ColumnParallelDense, RowParallelDense, ParallelEmbedding])
def test_whole_layers_are_quantized(made):
    layer = made(8) if made is not ParallelEmbedding else made(4, 8)
    layer.build((None, 4))
    layer.quantize("int8")
    assert layer.quantization_mode == "int8"


def test_quantized_layers_are_not_split(ranks):
    def work(group):
        layer = ColumnParallelDense(8, dtype="int8_from_float32")
        with (
            meshed(group).scope(),
            pytest.raises(ValueError, match="a quantized layer is not split; use it"),
        ):
            layer.build((None, 4))

    ranks(2)(work)
