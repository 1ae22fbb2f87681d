"""A warning if processes begin training with different weights, which averaging gradients does not correct."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engine.exchange import Exchange
from tfdist.optimizers.gradients import GradientAverager

log = logging.getLogger("tfdist")


class InitialWeightCheck(keras.callbacks.Callback):
    """A callback that compares the weights of all processes before the first batch, after the other callbacks.

    Args:
        gradients: averages gradients over the processes that are compared.
    """

    def __init__(self, gradients: GradientAverager) -> None:
        super().__init__()
        self._gradients = gradients
        self._is_compared = gradients.group.size == 1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares weights before the first batch."""
        if self._is_compared:
            return
        self._is_compared = True
        common = [weight for weight in self.model.trainable_variables if not self._gradients.is_local(weight)]
        checksum = 0
        for variable in common:
            checksum = zlib.crc32(np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8).data, checksum)
        everyone = Exchange(self._gradients.group).all_gather(tf.constant([checksum], tf.int64)).numpy()
        if (everyone != everyone[0]).any():
            log.warning(
                "tfdist: the processes begin to train with different weights, which will stay different, because "
                "DistributedOptimizer averages only gradients. Pass tfdist.callbacks.BroadcastVariables() to fit, or "
                "set the same seed on every process before the model is made."
            )
