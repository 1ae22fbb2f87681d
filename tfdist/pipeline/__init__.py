"""Pipelines: the stages of a model work at the same time, each on another part of a batch."""
