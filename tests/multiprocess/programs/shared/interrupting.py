"""A callback that interrupts training, which is to go on where it was."""

import keras


class Interrupts(keras.callbacks.Callback):
    """Ends training with an error at the beginning of an epoch, or after a batch of the first one.

    Args:
        epoch: number of the epoch; None for a batch.
        batch: number of the batch.
    """

    def __init__(self, epoch=None, batch=None):
        super().__init__()
        self.epoch, self.batch = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyError("interrupted")

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise KeyError("interrupted")
