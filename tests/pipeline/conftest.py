"""These tests need several devices: the CPU is three."""

import tensorflow as tf

from tests.engine.ranks import ranks  # noqa: F401  (a fixture)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)
