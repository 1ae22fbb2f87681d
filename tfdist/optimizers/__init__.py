"""Optimizers: the averaging of gradients in scripts that share their data out themselves; LARS, for large batches."""

from tfdist.strategies import require_tensorflow

require_tensorflow()

from tfdist.optimizers.lars import LARS  # noqa: E402

__all__ = ["LARS"]
