"""Seams: functions of Keras and TensorFlow that tfdist replaces, each once, with what stands on it in a fixed order."""
