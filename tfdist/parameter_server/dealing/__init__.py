"""Deals the batches of an epoch to any number of workers, so that each batch counts once."""
