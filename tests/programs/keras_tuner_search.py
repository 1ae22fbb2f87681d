"""A search by KerasTuner with ``distribution_strategy=``; all processes take the same trials."""

import keras
import keras_tuner
from common import batched, digits, folder, strategy

scope = strategy()
images, labels = digits(60)
flat = images.reshape(-1, 64)


def build(hp):
    units = hp.Int("units", 4, 12, step=4)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(10)])
    rate = hp.Choice("rate", [0.1, 0.01])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


tuner = keras_tuner.RandomSearch(
    build,
    objective="val_loss",
    max_trials=2,
    seed=3,
    distribution_strategy=None if type(scope).__name__ == "_DefaultDistributionStrategy" else scope,
    directory=str(folder("keras_tuner_search") / str(getattr(scope, "rank", 0))),  # each rank keeps its own books
    project_name="digits",
    overwrite=True,
)
validation = batched(flat[40:], labels[40:], size=20)
tuner.search(batched(flat[:40], labels[:40], size=20), epochs=2, verbose=0, validation_data=validation)
best = tuner.get_best_hyperparameters()[0].values
model = tuner.get_best_models()[0]
results = {"best": {name: float(value) for name, value in best.items()}, "outputs": model(flat[:5])}
