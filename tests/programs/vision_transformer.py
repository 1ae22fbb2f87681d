"""A vision transformer: patches by an own layer, attention, AdamW with a warm-up schedule of the user's own."""

import keras
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(99)


@keras.saving.register_keras_serializable()
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, peak, steps):
        self.peak, self.steps = peak, steps

    def __call__(self, step):
        step = ops.cast(step, "float64") + 1.0
        return self.peak * ops.minimum(step / self.steps, ops.sqrt(self.steps / step))

    def get_config(self):
        return {"peak": self.peak, "steps": self.steps}


class Patches(layers.Layer):
    def __init__(self, size, width, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.projection = layers.Dense(width)
        self.position = layers.Embedding(16, width)

    def call(self, images):
        patches = ops.image.extract_patches(images, (self.size, self.size))
        patches = ops.reshape(patches, (ops.shape(images)[0], 16, self.size**2))
        return self.projection(patches) + self.position(ops.arange(16))


def block(x, width):
    normalized = layers.LayerNormalization()(x)
    x = layers.Add()([layers.MultiHeadAttention(2, width // 2)(normalized, normalized), x])
    hidden = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([layers.Dense(width)(hidden), x])


with scope.scope():
    inputs = keras.Input((8, 8, 1))
    x = block(Patches(2, 8)(inputs), 8)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.AdamW(WarmUp(0.01, 4), weight_decay=0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

first = model.predict(images[:1], verbose=0)  # before anything else: ranks without a row
history = model.fit(images, labels, batch_size=32, epochs=2, shuffle=False, verbose=0)
results = {"first": first, "weights": weights(model), "history": history.history}
TOLERANCE = 1e-7  # a gradient that is nothing but rounding (the key's bias) becomes a step of Adam's
