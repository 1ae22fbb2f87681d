"""Distributed datasets, and the shares of batches that replicas get."""
