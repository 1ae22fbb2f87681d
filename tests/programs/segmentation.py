"""A small U-Net with ordinary, depthwise and separable convolutions; the last batch leaves ranks without an image.

33 images in batches of 32: on two and three processes one rank has an image in the second step, others have none.
In float32, in which oneDNN's kernels run.
"""

import keras
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
images, _ = digits(33)
images = images.astype("float32")
masks = (images > 0.4).astype("int64")


def right(y_true, y_pred):
    """One number for the batch, as metric functions often return."""
    return ops.mean(ops.cast(y_true == ops.cast(ops.argmax(y_pred, axis=-1)[..., None], y_true.dtype), "float32"))


with scope.scope():
    inputs = keras.Input((8, 8, 1))
    top = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D()(top)
    x = layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)
    x = layers.SeparableConv2D(6, 3, padding="same", activation="relu")(x)
    x = layers.GroupNormalization(2)(x)
    x = layers.Conv2DTranspose(4, 2, strides=2)(x)
    x = layers.Concatenate()([x, top])
    model = keras.Model(inputs, layers.Conv2D(2, 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    iou = keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou")
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy", iou, right])

history = model.fit(images, masks, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_data=(images, masks))
means = {name: history.history.pop(name) for name in ("right", "val_right")}  # of batches; of shares it is another
results = {
    "close": means,
    "weights": weights(model),
    "history": history.history,
    "outputs": model.predict(images, batch_size=32, verbose=0),
}
TOLERANCE = 1e-4
