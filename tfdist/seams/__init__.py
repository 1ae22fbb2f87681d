"""Seams: functions of Keras and TensorFlow that tfdist replaces, each once, with its wrappers in a fixed order."""
