"""Optimizers: gradients averaged in scripts that divide their data themselves; LARS and noise, for large batches."""

from tfdist.strategies import require_tensorflow

require_tensorflow()

from tfdist.optimizers.gradient_noise import GradientNoise  # noqa: E402
from tfdist.optimizers.lars import LARS  # noqa: E402

__all__ = ["LARS", "GradientNoise"]
