"""Progress of many keyed collectives at once, and their operations in TensorFlow."""
