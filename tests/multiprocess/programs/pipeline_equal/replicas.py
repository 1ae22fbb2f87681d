"""Checks on four processes: four stages, or two pipelines of two stages beside each other."""

import keras
import numpy as np
from callbacks import stopped_in_the_middle
from keras import layers
from world import ROWS, check, classes, crossentropy, fitted, made, network, trained, vectors

import tfdist


@check(4, schedule="zero_bubble")
def four_stages(place):
    model = made(place, network, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
    return trained(place, model, *vectors())


def pipelines(**arguments):
    return check(4, stages=2, data=2, micro_batches=2, **arguments)


@pipelines(schedule="1f1b")
def pipelines_with_weights_of_samples(place):
    model = made(place, network, "adam", crossentropy(), metrics=lambda: ["accuracy"])
    return fitted(place, model, *classes(), sample_weight=np.linspace(0, 2, ROWS), epochs=1)


@pipelines()
def pipelines_stop_together(place):
    """The wish of a process of one pipeline reaches those of its stage in the other, and these all."""
    return stopped_in_the_middle(place)


@keras.saving.register_keras_serializable()
class Seen(layers.Layer):
    """Has a metric of what passes through it."""

    def build(self, _):
        self.mean = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


@pipelines()
def pipelines_of_which_one_has_no_rows(place):
    """In the last batch, of one row; a layer's metric counts no stand-in, on the processes of other stages, too."""

    def make():
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), Seen(), layers.Dense(3)])

    x, y = vectors(9)
    model = made(place, make, lambda: keras.optimizers.SGD(0.01), "mse")
    return {
        **trained(place, model, x, y, epochs=1),
        "seen": model.evaluate(x, y, 8, verbose=0, return_dict=True)["seen"],
    }


@pipelines(schedule="1f1b")
def pipelines_with_a_masked_loss(place):
    """Its divisor is the number of words in the batches of both pipelines."""

    def make():
        inputs = keras.Input((5,), dtype="int32")
        embedded = layers.Embedding(9, 4, mask_zero=True)(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.Dense(4, "tanh")(layers.Dense(4)(embedded))))

    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 9, (ROWS, 5)), rng.integers(0, 3, (ROWS, 5))
    x[:9, 2:] = 0
    model = made(place, make, lambda: keras.optimizers.SGD(0.1), crossentropy(), metrics=lambda: ["accuracy"])
    return trained(place, model, x, y, epochs=1)


@check(4, stages=4, data=2, micro_batches=2, schedule="interleaved", compression=tfdist.compression.Float16())
def pipelines_that_compress(place):
    results = trained(place, made(place, network, "sgd", "mse"), *vectors())
    return {"low": {"history": results["history"]}}
