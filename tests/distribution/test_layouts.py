"""What layouts say of weights and outputs; of two devices, without any process for them."""

import logging

import keras
import pytest

from tfdist.distribution import layouts

kd = keras.distribution


def parallel(given, shape=(1, 2)):
    layout_map = kd.LayoutMap(kd.DeviceMesh(shape, ["data", "model"], ["cpu:0", "cpu:1"]))
    for key, value in given.items():
        layout_map[key] = value
    return kd.ModelParallel(layout_map=layout_map)


@pytest.fixture
def model():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, name="d")(inputs), name="m")


@pytest.mark.parametrize(
    ("layout", "shape", "divides"),
    [
        ((None, "model"), (1, 2), True),
        (("model", None), (1, 2), True),
        ((None, None), (1, 2), False),
        ((None, "model"), (2, 1), False),
        (("data", "model"), (2, 1), True),
    ],
)
def test_a_layout_divides_along_an_axis_of_several_devices(model, layout, shape, divides):
    kernel, bias = model.weights
    distribution = parallel({"d/kernel": layout}, shape)
    assert layouts.divides(distribution, kernel) is divides
    assert not layouts.divides(distribution, bias)


def test_layout_of_a_variable_itself(model):
    kernel, _ = model.weights
    distribution = parallel({})
    kernel._layout = kd.TensorLayout((None, "model"), distribution.device_mesh)
    assert layouts.divides(distribution, kernel)


def test_layout_of_other_axes_is_an_error(model):
    with pytest.raises(ValueError, match=r"the layout \('model',\) has 1 axes; the weight d/kernel of shape \(4, 3\)"):
        layouts.divides(parallel({"d/kernel": ("model",)}), model.weights[0])


def test_two_keys_for_a_path_are_keras_error(model):
    with pytest.raises(ValueError, match="matches multiple layout"):
        layouts.divides(parallel({"d/.*": ("model",), ".*/kernel": (None, "model")}), model.weights[0])


def test_keys_that_match_nothing_are_told_once(model, caplog):
    distribution = parallel({"x/kernel": (None, "model"), "y": ("model",)})
    with caplog.at_level(logging.WARNING, "tfdist"):
        for _ in range(2):
            layouts.check_keys(distribution, model, strict=False)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "none of the keys 'x/kernel', 'y' of the LayoutMap matches a path of the model m" in told
    assert "Its weights are d/kernel, d/bias" in told
    with pytest.raises(ValueError, match=r"none of the keys .*leave out strict=True"):
        layouts.check_keys(distribution, model, strict=True)


@pytest.mark.parametrize("keys", [["d/kernel", "x"], ["d/output"], []])
def test_keys_that_match_something(model, caplog, keys):
    layouts.check_keys(parallel(dict.fromkeys(keys, (None, "model"))), model, strict=True)
    layouts.check_keys(kd.DataParallel(devices=["cpu:0"]), model, strict=True)
    assert not caplog.records


def test_an_activation_that_is_not_split_is_told_once(caplog, monkeypatch):
    distribution = parallel({})
    mesh = distribution.device_mesh
    whole, batch, split = (kd.TensorLayout(axes, mesh) for axes in ((None,), ("data", None), ("data", "model")))
    layouts.keep_together(split)  # no distribution is set
    monkeypatch.setattr(layouts.distributions, "distribution", lambda: distribution)
    for layout in (whole, batch, split, split):
        layouts.keep_together(layout)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "activations are not split along 'model', as the layout ('data', 'model') says" in told
