"""Clips one process's gradients before they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class LocalClipping:
    """Limits for the clipping of gradients, applied in the order of the attributes.

    Attributes:
        norm: largest norm of each gradient; None for no limit.
        global_norm: largest norm of all gradients together; None for no limit.
        value: largest absolute value of an element; None for no limit.
    """

    norm: float | None = None
    global_norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise ValueError(f"local clipping needs a positive limit; got local_clip_{name}={limit!r}")

    def clipped(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients clipped to the limits.

        Args:
            gradients: dense or sparse gradients.
        """
        clipped = list(gradients)
        if self.norm is not None:
            clipped = [tf.clip_by_norm(gradient, self.norm) for gradient in clipped]
        if self.global_norm is not None and clipped:
            clipped, _ = tf.clip_by_global_norm(clipped, self.global_norm)
        if self.value is not None:
            clipped = [tf.clip_by_value(gradient, -self.value, self.value) for gradient in clipped]
        return clipped
