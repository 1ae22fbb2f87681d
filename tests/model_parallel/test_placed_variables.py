"""Variables, and what optimizers keep for them, are where scopes asked for them."""

import keras

from tests.model_parallel.executed import executed, homes, train_step
from tfdist.model_parallel.device_scope import device_scope


def test_weights_made_by_shape_inference_are_on_scope_device():
    class Late(keras.layers.Layer):
        """A layer without ``build``: Keras makes its inner layer's weights when it infers the shape of the output."""

        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(3)

        def call(self, inputs):
            with device_scope("CPU:2"):
                return self.inner(inputs)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Late()(inputs))
    assert homes(model.variables) == ["CPU:2"] * 2


def test_frozen_weights_and_moving_averages_are_on_scope_device():
    inputs = keras.Input((8,))
    with device_scope("CPU:1"):
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    with device_scope("CPU:2"):
        outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.5)(hidden))
    model = keras.Model(inputs, outputs)
    model.layers[1].trainable = False
    model.compile(keras.optimizers.AdamW(use_ema=True, global_clipnorm=1.0), "mse")
    operations = executed(train_step(model, 8))
    assert [operation for operation in operations if operation.is_elsewhere] == []
    batch_norm = model.layers[2]
    assert homes(batch_norm.variables) == ["CPU:1"] * 4
    of_optimizer = {variable.path.rpartition("/")[2]: home for variable, home in zip(
        model.optimizer.variables, homes(model.optimizer.variables), strict=True
    )}  # fmt: skip
    for name, home in of_optimizer.items():
        if "batch_normalization" in name:
            assert home == "CPU:1", name
        elif "dense" in name:
            assert home == "CPU:2", name


def test_gradient_accumulators_are_on_scope_device():
    inputs = keras.Input((8,))
    with device_scope("CPU:2"):
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), "mse")
    step = train_step(model, 8)
    before = model.get_weights()[0]
    step()
    assert (model.get_weights()[0] == before).all()
    step()
    assert (model.get_weights()[0] != before).any()
    kept = [variable for variable in model.optimizer.variables if len(variable.shape)]
    assert set(homes(kept)) == {"CPU:2"}
