"""The version, alone in a file that can be read without importing TensorFlow."""

__version__ = "0.1.0"
