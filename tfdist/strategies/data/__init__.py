"""Batches, and the shares of them that replicas get."""
