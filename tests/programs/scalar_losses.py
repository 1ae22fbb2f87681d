"""Loss functions that return one number for the batch: sqrt(mean), Dice, Tversky.

Each is a statistic of the batch; that of a share and its gradient differ from it, and are only close. The program
shows that the gradient has the right length for any number of shares.
"""

import keras
from common import change, digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(192)
flat = images.reshape(-1, 64)


def root_mean_squared_error(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def train(loss, target, activation):
    keras.utils.set_random_seed(1)
    with scope.scope():
        inputs = keras.Input((64,))
        outputs = [layers.Dense(10, activation=activation)(inputs) for _ in target]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), loss)
    before = weights(model)
    history = model.fit(flat, target, batch_size=48, epochs=2, shuffle=False, verbose=0)
    return {"moved": change(model, before), "history": history.history}


one_hot = keras.utils.to_categorical(labels, 10)
overlaps = [keras.losses.Dice(), keras.losses.Tversky(alpha=0.3, beta=0.7)]
results = {
    "close": {
        "rmse": train([root_mean_squared_error], [one_hot], None),
        "overlap": train(overlaps, [one_hot, one_hot], "softmax"),
    }
}
