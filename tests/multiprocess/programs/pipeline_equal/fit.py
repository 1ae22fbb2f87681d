"""Checks of `fit`, `evaluate` and `predict`: schedules, models, data, and arguments."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from world import ROWS, check, classes, crossentropy, fitted, made, network, state, trained, trained_on_arrays, vectors

import tfdist
from tests.pipeline import models
from tfdist.strategies.divided.described_variables import is_described


@check(2, schedule="1f1b", micro_batches=4, recompute=True)
def one_f_one_b_recomputing(place):
    return trained(place, made(place, network, lambda: keras.optimizers.SGD(0.5, 0.9), "mae"), *vectors())


@check(2, schedule="zero_bubble", micro_batches=4)
def zero_bubble_adam(place):
    model = made(place, network, "adam", crossentropy(), metrics=lambda: ["accuracy"])
    return fitted(place, model, *classes(), validation_split=0.3)


@check(2, schedule="interleaved", stages=4)
def interleaved_and_shuffled_with_a_seed(place):
    model = made(place, network, lambda: keras.optimizers.Adam(0.01), "huber", steps_per_execution=2)
    keras.utils.set_random_seed(3)
    return trained_on_arrays(place, model, *vectors(), shuffle=True)


@check(2, schedule="gpipe", micro_batches=4, cuts=["last"])
def dataset_with_steps(place):
    x, y = vectors()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(30, seed=3).batch(8)
    model = made(place, network, "sgd", "mse")
    history = [
        model.fit(data.repeat(), steps_per_epoch=3, epochs=2, verbose=0).history,
        model.fit(data, epochs=3, initial_epoch=1, validation_data=data.take(2), verbose=0).history,
        model.fit(data.repeat(), steps_per_epoch=3, validation_data=data, validation_steps=2, verbose=0).history,
    ]
    outputs = model.predict(data.map(lambda x, y: x), verbose=0)
    return {"history": history, "outputs": outputs, "weights": model.get_weights()}


@check(2)
def on_batches(place):
    x, y = vectors()
    model = made(place, network, "sgd", "mse", metrics=lambda: ["mae"])
    logs = [model.train_on_batch(x[:8], y[:8], return_dict=True) for _ in range(2)]
    logs.append(model.train_on_batch(x[:4], y[:4], sample_weight=np.arange(4.0)))
    logs.append(model.test_on_batch(x[:5], y[:5]))
    outputs = model.predict_on_batch(x[:5])
    return {"logs": logs, "outputs": outputs, "state": state(place, model)}


@check(2)
def built_by_the_first_batch(place):
    """Keras builds such a model with the rows of a batch, which micro-batches do not have."""
    model = made(place, lambda: keras.Sequential([layers.Dense(7, "tanh"), layers.Dense(3)]), "sgd", "mse")
    return fitted(place, model, *vectors(), epochs=1)


def of_samples(place):
    model = made(place, network, lambda: keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="none"))
    return trained_on_arrays(place, model, *vectors(), sample_weight=np.linspace(0, 2, ROWS), validation_split=0.3)


@check(2, schedule="1f1b")
def losses_of_samples_one_f_one_b(place):
    return of_samples(place)


@check(2, schedule="gpipe")
def losses_of_samples_gpipe(place):
    return of_samples(place)


@check(2)
def a_trained_base_with_another_head(place):
    x, y = vectors()
    model = made(place, network, "sgd", "mse")
    first = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    with place.scope():
        head = keras.layers.Dense(y.shape[1], name="another")
        other = keras.Model(model.inputs, head(model.layers[-1].input))
        other.compile("sgd", "mse")
    return {"first": first, **trained(place, other, x, y)}


@check(2)
def weights_of_samples_and_classes(place):
    x, y = classes()
    model = made(place, network, "sgd", crossentropy(), lambda: ["accuracy"], weighted_metrics=["accuracy"])
    first = trained(place, model, x, y, class_weight={0: 0.3, 1: 2.0, 2: 1.0}, epochs=1)
    return {"first": first, **trained_on_arrays(place, model, x, y, sample_weight=np.linspace(0, 2, ROWS))}


@check(2)
def summary_and_eager_steps(place):
    lines = []
    model = made(place, network, "sgd", "mse")
    model.summary(print_fn=lambda text, line_break=True: lines.append(text))
    model.run_eagerly = True
    results = fitted(place, model, *vectors(), epochs=1)
    return {"summary": "".join(lines).encode().hex(), "parameters": model.count_params(), **results}


@check(3, schedule="1f1b", cuts="memory")
def each_process_holds_its_own_stage(place):
    model = made(place, network, lambda: keras.optimizers.SGD(0.05, 0.9), "mse")
    model.fit(tf.data.Dataset.from_tensors(vectors()), verbose=0)
    if place.strategy is not None:
        placement = place.strategy.extended.of_model(model).placement
        state = [*model.trainable_variables, *model.optimizer.variables[2:]]
        held = sum(variable.shape.num_elements() for variable in state if not is_described(variable))
        assert held == sum(variable.shape.num_elements() for variable in state if placement.holds(variable))
        everyone = tfdist.all_gather(tf.constant([held])).numpy()
        layers = [2 * layer.count_params() for layer in model.layers]
        assert everyone.sum() == sum(layers)
        cuts = itertools.combinations(range(1, len(layers)), 2)
        best = min(max(sum(layers[:a]), sum(layers[a:b]), sum(layers[b:])) for a, b in cuts)
        assert everyone.max() <= 1.15 * best
    return {}


def of_model(name, optimizer, loss="mse", **compiled):
    def run(place):
        model = made(place, models.MODELS[name], optimizer, loss, **compiled)
        x, y = ([tensor.numpy() for tensor in part] for part in models.data_of(model, ROWS))
        x = x if len(x) > 1 else x[0]
        y = dict(zip(model.output_names, y, strict=True)) if len(y) > 1 else y[0]
        return fitted(place, model, x, y) if len(model.outputs) > 1 else trained(place, model, x, y)

    run.__name__ = name
    return run


check(3, schedule="1f1b")(of_model("skips", lambda: keras.optimizers.SGD(0.05, 0.9)))
check(3, schedule="gpipe")(of_model("shared", "sgd"))
check(2, schedule="1f1b")(of_model("words_again", lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5)))
# Not eagerly, where Keras weighs the losses of outputs by samples: in graphs, logs have the mean of the batches'.
check(3, schedule="zero_bubble")(
    of_model(
        "several_outputs",
        "adam",
        {"early": "mse", "late": "mae"},
        loss_weights={"early": 0.3, "late": 2.0},
        metrics=lambda: {"early": ["mae"], "late": ["mse"]},
        run_eagerly=False,
    )
)
