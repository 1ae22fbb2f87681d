"""Models, and Fashion-MNIST as read by Keras, from Debian's package dataset-fashion-mnist if it is installed."""

import os
import tempfile
from pathlib import Path

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def load():
    """Training and test images, between 0 and 1 with a channel axis, and labels. Call it before using Keras."""
    if not DEBIAN.is_dir():
        return _scaled()  # downloaded by Keras
    with tempfile.TemporaryDirectory() as home:
        os.environ["KERAS_HOME"] = home
        (Path(home) / "datasets").mkdir()
        (Path(home) / "datasets" / "fashion-mnist").symlink_to(DEBIAN)
        return _scaled()


def _scaled():
    import keras

    pairs = keras.datasets.fashion_mnist.load_data()
    return [((images / 255.0).astype("float32")[..., None], labels.astype("int32")) for images, labels in pairs]


def mlp(units=(256, 128)):
    """784 inputs, hidden layers, 10 classes; 235,146 parameters by default."""
    import keras

    hidden = [keras.layers.Dense(width, "relu") for width in units]
    return keras.Sequential([keras.layers.Input((28, 28, 1)), keras.layers.Flatten(), *hidden, keras.layers.Dense(10)])


def lenet():
    """LeNet-5 with ReLU and max-pooling: two convolutions, three dense layers, 61,706 parameters."""
    import keras

    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(6, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(120, "relu"),
            keras.layers.Dense(84, "relu"),
            keras.layers.Dense(10),
        ]
    )
