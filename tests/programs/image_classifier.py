"""An image classifier in keras.io's manner: augmentation, batch normalization, dropout, mixup in tf.data.

Masks and crops are drawn by each replica for itself, and batch normalization takes the statistics of a share, so
only ranks are compared; predictions are made by the same weights, so `evaluate` must agree with them.
"""

import keras
import numpy as np
import tensorflow as tf
from common import Logs, digits, strategy, weights
from keras import layers

scope = strategy()
images, labels = digits(100)
one_hot = keras.utils.to_categorical(labels, 10)

with scope.scope():
    augment = keras.Sequential([layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)])
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, use_bias=False)(augment(inputs))
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        metrics=["accuracy"],
    )


def mixup(first, second):
    share = tf.constant(0.8, tf.float64)
    return share * first[0] + (1 - share) * second[0], share * first[1] + (1 - share) * second[1]


data = tf.data.Dataset.from_tensor_slices((images, one_hot)).batch(32)
logs = Logs()
history = model.fit(
    tf.data.Dataset.zip((data, data)).map(mixup),
    epochs=2,
    verbose=0,
    validation_data=data,
    callbacks=[logs, keras.callbacks.EarlyStopping(patience=1)],
)
evaluated = model.evaluate(data, verbose=0)
predicted = model.predict(data, verbose=0)
by_hand = float(np.mean(predicted.argmax(1) == labels))
assert abs(by_hand - evaluated[1]) < 1e-9, (by_hand, evaluated)
results = {"ranks_only": {"weights": weights(model), "logs": logs.seen, "evaluated": evaluated, "outputs": predicted}}
