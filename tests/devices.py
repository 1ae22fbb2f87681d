"""Three devices, which some tests need: the CPU is divided. TensorFlow takes one division in a process."""

import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)
