"""Structured data with preprocessing layers: adapted statistics, vocabularies, text; strings out of `predict`."""

import keras
import numpy as np
import tensorflow as tf
from common import strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(7)
age = rng.normal(50, 12, size=(60, 1))
city = np.array(["Bern", "Oslo", "Rome", "Bonn"])[rng.integers(0, 4, 60)][:, None]
note = np.array(["a good day", "a bad day", "no day at all", "good"])[rng.integers(0, 4, 60)][:, None]
target = (age > 50).astype("float64")
features = {"age": tf.constant(age), "city": tf.constant(city), "note": tf.constant(note)}

with scope.scope():
    normalize = layers.Normalization()
    normalize.adapt(age)
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(city)
    vectorize = layers.TextVectorization(max_tokens=12, output_sequence_length=4)
    vectorize.adapt(note[:, 0])
    name_of = layers.StringLookup(vocabulary=lookup.get_vocabulary(), invert=True)

    inputs = {"age": keras.Input((1,), name="age")}
    inputs["city"] = keras.Input((1,), name="city", dtype="string")
    inputs["note"] = keras.Input((1,), name="note", dtype="string")
    words = layers.Embedding(12, 3)(vectorize(inputs["note"]))
    x = [normalize(inputs["age"]), lookup(inputs["city"]), layers.GlobalAveragePooling1D()(words)]
    x = layers.Concatenate()(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    named = keras.Model(inputs, {"city": name_of(layers.Lambda(lambda t: tf.argmax(t, -1))(lookup(inputs["city"])))})

data = tf.data.Dataset.from_tensor_slices((features, target)).batch(25)
history = model.fit(data, epochs=2, verbose=0)
results = {
    "weights": [weight for weight in weights(model) if weight.dtype.kind == "f"],
    "history": history.history,
    "adapted": [np.asarray(normalize.mean), np.asarray(normalize.variance)],
    "vocabulary": vectorize.get_vocabulary(),
    "outputs": model.predict(data, verbose=0),
    "names": named.predict(data, verbose=0)["city"],
}
