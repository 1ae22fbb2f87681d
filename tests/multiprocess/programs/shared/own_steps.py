"""Models and loops whose steps are not Keras's own."""

import keras
import tensorflow as tf


class Gan(keras.Model):
    """Two networks, each with an optimizer."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(5), keras.layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean("loss")

    def build(self, shape):
        self.one.build((None, 5))
        self.other.build((None, 5))

    def compile(self, optimizer_of_one, optimizer_of_other):
        super().compile()
        self.of_one, self.of_other = optimizer_of_one, optimizer_of_other

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            made = self.other(self.one(data))
            loss, against = tf.reduce_mean(tf.square(made - 1)), tf.reduce_mean(tf.square(made))
        for optimizer, value, network in ((self.of_one, loss, self.one), (self.of_other, against, self.other)):
            variables = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def stepping(strategy, model):
    """A step of training in a loop of one's own."""

    def replica(x, y):
        with tf.GradientTape() as tape:
            squares = tf.reduce_mean(tf.square(model(x, training=True) - y), axis=-1)
            loss = tf.nn.compute_average_loss(squares)  # divided by the number of replicas
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.run(replica, (x, y))

    return step
