"""Transfer learning: a frozen base, then unfrozen and compiled anew with a lower rate; a part of the layers shared."""

import keras
from common import digits, strategy, weights
from keras import layers

scope = strategy()
images, labels = digits(65)

with scope.scope():
    base = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.LayerNormalization(), layers.Flatten()]
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(10)(base(inputs, training=False)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
frozen = model.fit(images, labels, batch_size=32, epochs=1, shuffle=False, verbose=0).history
with scope.scope():
    base.trainable = True
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
tuned = model.fit(images, labels, batch_size=32, epochs=1, shuffle=False, verbose=0, validation_split=0.2).history
results = {"frozen": frozen, "tuned": tuned, "weights": weights(model)}
TOLERANCE = 1e-8
