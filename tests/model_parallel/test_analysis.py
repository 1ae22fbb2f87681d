"""Analyses of models, and what a person reads."""

import keras
import pytest

from tests.model_parallel.test_device_scope import Subclassed, functional, two_sequences
from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense
from tfdist.model_parallel.analysis import analyze
from tfdist.runtime.mesh import Mesh
from tfdist.strategies.divided.footprint import SplitFootprint


def test_costs_of_perceptron_equal_hand_computed_values():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu", name="a"), keras.layers.Dense(1, name="b")]
    )
    analysis = analyze(model, 4)
    assert [(call.name, call.kind) for call in analysis.calls] == [("a", "Dense"), ("b", "Dense")]
    assert [call.flops for call in analysis.calls] == [4 * (2 * 8 * 16 + 16 + 16), 4 * (2 * 16 + 1)]
    assert [call.parameters for call in analysis.calls] == [8 * 16 + 16, 16 + 1]
    assert [call.activations for call in analysis.calls] == [4 * 16 * 4, 4 * 4]
    assert analysis.work == analysis.depth == sum(call.flops for call in analysis.calls)


def test_shared_layer_counts_once_and_forms_parallel_branches():
    model = two_sequences(keras.layers.LSTM(8, name="lstm"))
    analysis = analyze(model)
    names = [call.name for call in analysis.calls]
    assert names[:2] == ["lstm", "lstm (2)"]
    assert [call.parameters > 0 for call in analysis.calls[:2]] == [True, False], "counted once"
    assert [call.device for call in analysis.calls[:2]] == ["/device:CPU:1", "/device:CPU:2"]
    (branches,) = analysis.branches
    assert branches.parts == (("lstm",), ("lstm (2)",))
    assert analysis.parallelism == pytest.approx(2, rel=0.05)


def test_nested_model_is_analyzed_call_by_call():
    inputs = keras.Input((8,))
    inner = functional()
    analysis = analyze(keras.Model(inputs, inner(inputs) * 2.0))
    inner_analysis = analyze(inner)
    assert [call.name for call in analysis.calls[:-1]] == [f"{inner.name}/{call.name}" for call in inner_analysis.calls]
    assert analysis.calls[-1].kind == "Multiply"
    assert analysis.work == inner_analysis.work + 1
    assert sum(call.parameters for call in analysis.calls) == inner.count_params()


def test_a_model_that_is_called_twice_is_one_call():
    inputs = keras.Input((8,))
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    analysis = analyze(keras.Model(inputs, inner(inner(inputs))))
    assert [call.kind for call in analysis.calls] == ["Sequential", "Sequential"]
    assert [call.parameters for call in analysis.calls] == [inner.count_params(), 0]


def test_report_names_calls_devices_and_parallelism():
    text = str(analyze(two_sequences(keras.layers.LSTM(8, name="lstm")), 32))
    assert "Forward pass of 32 samples" in text
    assert "lstm (2)" in text
    assert "CPU:2" in text
    assert "W/D = 2.0" in text or "W/D = 1.99" in text
    assert "Side by side from the inputs to concatenate" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Subclassed, "has no graph of layers. Write it with the functional API"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "is not built yet. Begin it with a keras.Input"),
        (lambda: None, "got None, which is not a Keras model"),
    ],
)
def test_models_without_a_graph(make, message):
    with pytest.raises(ValueError, match=message):
        analyze(make())


@pytest.mark.parametrize("batch_size", [0, None, 2.0])
def test_invalid_batch_size_raises(batch_size):
    with pytest.raises(ValueError, match=f"batch_size must be an integer of at least 1; got {batch_size}"):
        analyze(functional(), batch_size)


def test_unknown_input_shape_raises():
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, keras.layers.Dense(4)(inputs))
    with pytest.raises(ValueError, match="Give the model an Input of known shape"):
        analyze(model)


def test_weights_in_rows_are_counted_beside_the_calls():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1 << 14), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    analysis = analyze(model, 4, shard="weights", processes=2)
    assert analysis.footprint.in_parts == 4 * 8 << 14
    assert "Large weights and the optimizer are divided. Its variables" in " ".join(str(analysis).split())
    at_once = analyze(model, 4, shard="weights", gather="model", processes=2).footprint
    assert analysis.footprint.sent - at_once.sent == analysis.footprint.in_parts // 2


def split_model():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            ColumnParallelDense(16, gather_output=False),
            RowParallelDense(6, input_is_parallel=True),
            ColumnParallelDense(4),
            RowParallelDense(2, use_bias=False),
        ]
    )
    model.compile("adam", "mse")
    return model


def test_split_layers_are_counted_for_a_mesh():
    """Each of four processes has 2 of 8 samples; kernels and biases of columns are in two parts."""
    analysis = analyze(split_model(), 8, mesh=Mesh(data=2, model=2))
    whole = 3 * 4 * (8 * 16 + 16 + 16 * 6 + 6 * 4 + 4 + 4 * 2)
    assert analysis.split == SplitFootprint(6, whole, whole // 2)
    assert analysis.exchanged == 2 * 4 * 2 * (8 + 6 + (6 + 4 / 2) + (4 / 2 + 2))
    assert "6 weight(s) are split. With the optimizer's variables" in " ".join(str(analysis).split())
    assert "For a step it sends up to 416 B of activations." in " ".join(str(analysis).split())
    inputs = keras.Input((3,), dtype="int64")
    embedding = keras.Model(inputs, ParallelEmbedding(5, 4, mesh_axis="data")(inputs))
    embedding.compile("sgd", "mse")
    assert analyze(embedding, 4, mesh=Mesh(data=2)).exchanged == 2 * 3 * (8 + 2 * 4 * 4 / 2)


def test_split_layers_are_counted_beside_other_weights_in_parts():
    analysis = analyze(split_model(), 8, shard="optimizer", mesh=Mesh(model=2))
    assert analysis.split.weights == 6
    assert "in a step, and what split layers exchange." in " ".join(str(analysis).split())
    assert analysis.footprint.sent == 2 * 4 * 6, "the bias that is whole"


def test_what_a_mesh_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"ColumnParallelDense .*: 16 units do not divide over the 3 processes"):
        analyze(split_model(), 6, mesh=Mesh(model=3))
    with pytest.raises(ValueError, match=r"Mesh\(data=2\) has no axis 'model'"):
        analyze(split_model(), mesh=Mesh(data=2))
    with pytest.raises(TypeError, match=r"mesh must be a tfdist.Mesh, .*; got 2"):
        analyze(split_model(), mesh=2)


def test_a_divided_optimizer_is_counted_beside_the_calls():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    analysis = analyze(model, 4, shard="optimizer", processes=2)
    assert sum(analysis.footprint.slots) == 2 * 4 * model.count_params()
    assert "The optimizer is divided. Its variables for weights take" in " ".join(str(analysis).split())
    assert analyze(model).footprint is None
    for arguments, message in (
        ({"shard": "all"}, "None, 'optimizer' or 'weights'; got 'all'"),
        ({"gather": "all"}, "'layer' or 'model'; got 'all'"),
        ({"processes": 1}, "at least 2; got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            analyze(model, **arguments)
