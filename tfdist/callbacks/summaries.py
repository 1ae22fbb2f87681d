"""Files with figures of epochs, for TensorBoard, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class Summaries:
    """A file of figures, which is made when the first figure is written.

    Args:
        log_dir: TensorBoard's log directory; None writes nothing.
    """

    def __init__(self, log_dir: str | None) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def write(self, epoch: int, figures: Mapping[str, float], histograms: Mapping[str, Mapping[int, int]]) -> None:
        """Writes the figures of an epoch.

        Args:
            epoch: number of the epoch.
            figures: figures by name.
            histograms: counts of whole numbers, by name.
        """
        if not self._log_dir:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)
        with self._writer.as_default(step=epoch):
            for name, figure in figures.items():
                tf.summary.write(name, tf.constant(figure, tf.float32), metadata=_metadata("scalars"))
            for name, counts in histograms.items():
                buckets = [[value - 0.5, value + 0.5, count] for value, count in sorted(counts.items())]
                shaped = tf.reshape(tf.constant(buckets, tf.float64), (-1, 3))
                tf.summary.write(name, shaped, metadata=_metadata("histograms"))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _metadata(plugin: str) -> Any:
    """Returns metadata as in `tf.summary.scalar` or `histogram`, which are not called because they need TensorBoard."""
    data_class = "DATA_CLASS_SCALAR" if plugin == "scalars" else "DATA_CLASS_TENSOR"
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin
    return metadata
