"""Policy gradients in a custom loop: every process plays its own episodes, gradients are summed by the strategy.

The same set of episodes, divided among the processes, is compared with one process.
"""

import keras
import numpy as np
import tensorflow as tf
from common import PLAIN, strategy, weights
from keras import layers

scope = strategy()
rank, size = (0, 1) if PLAIN else (scope.rank, scope.size)
EPISODES, STEPS = 12, 5

with scope.scope():
    inputs = keras.Input((4,))
    common = layers.Dense(8, activation="tanh")(inputs)
    model = keras.Model(inputs, [layers.Dense(2, activation="softmax")(common), layers.Dense(1)(common)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
huber = keras.losses.Huber(reduction="sum")


def play(episode, iteration):
    """A made-up environment, the same for an episode wherever it is played."""
    rng = np.random.default_rng((iteration, episode))
    states, actions, returns = rng.normal(size=(STEPS, 4)), rng.integers(0, 2, STEPS), rng.normal(size=(STEPS, 1))
    return states, actions, returns


@tf.function
def learn(states, actions, returns):
    def replica(states, actions, returns):
        with tf.GradientTape() as tape:
            policy, value = model(states, training=True)
            chosen = tf.gather(policy, actions, axis=1, batch_dims=1)
            advantage = tf.stop_gradient(returns - value)[:, 0]
            loss = (huber(returns, value) - tf.reduce_sum(tf.math.log(chosen) * advantage)) / (EPISODES * STEPS)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return scope.reduce("SUM", scope.run(replica, args=(states, actions, returns)), axis=None)


losses = []
for iteration in range(3):
    played = [play(episode, iteration) for episode in range(rank, EPISODES, size)]
    states, actions, returns = (np.concatenate(part) for part in zip(*played, strict=True))
    losses.append(float(learn(tf.constant(states), tf.constant(actions), tf.constant(returns))))
results = {"weights": weights(model), "losses": losses}
