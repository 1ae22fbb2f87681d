"""Everything inside ``with strategy.scope():``, as Keras's distribution guide has it: fit with callbacks that write.

Checkpoints, a backup from which a second `fit` goes on, a plateau, early stopping, a schedule, a CSV log.
"""

import csv

import keras
from common import Logs, digits, folder, strategy, weights
from keras import callbacks, layers

scope = strategy()
images, labels = digits(160)
train, valid = (images[:120], labels[:120]), (images[120:], labels[120:])
place = folder("callbacks_in_scope")


def build():
    keras.utils.set_random_seed(6)
    model = keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(12, "tanh"), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


with scope.scope():
    logs = Logs()
    model = build()
    history = model.fit(
        *train,
        batch_size=24,
        epochs=12,
        shuffle=False,
        verbose=0,
        validation_data=valid,
        callbacks=[
            callbacks.ModelCheckpoint(place / "best.keras", save_best_only=True),
            callbacks.ModelCheckpoint(place / "{epoch:02d}.weights.h5", save_weights_only=True),
            callbacks.ReduceLROnPlateau(patience=1, min_delta=0.2, factor=0.5),
            callbacks.EarlyStopping(patience=2, min_delta=0.25, restore_best_weights=True),
            callbacks.CSVLogger(place / "log.csv"),
            logs,
        ],
    )
    best = keras.models.load_model(place / "best.keras")
    results = {
        "weights": weights(model),
        "history": history.history,
        "logs": logs.seen,
        "best": weights(best),
        "files": sorted(path.name for path in place.iterdir() if path.suffix == ".h5"),
        "rows": len(list(csv.DictReader((place / "log.csv").open()))),
    }

    # Interrupted, and started again: a schedule by epochs shows that the second run knows where it was.
    class Interrupted(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def halved(epoch, rate):
        return rate * 0.5 if epoch else rate

    def run(*more):
        model = build()
        scheduler = callbacks.LearningRateScheduler(halved)
        backup = callbacks.BackupAndRestore(place / "backup")
        return model, model.fit(
            *train, batch_size=24, epochs=4, shuffle=False, verbose=0, callbacks=[backup, scheduler, *more]
        )

    try:
        run(Interrupted())
    except KeyboardInterrupt:
        pass
    model, history = run()
    results["resumed"] = {"weights": weights(model), "epochs": history.epoch, "history": history.history}
