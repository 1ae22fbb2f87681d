"""Keyed progress of many collectives at once, and their way in and out of TensorFlow."""
