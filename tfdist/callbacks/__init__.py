"""Keras callbacks: reports on communication, and what ``fit`` needs in a script that divides its data itself.

Pass them to ``fit`` on every process.
"""

from typing import TYPE_CHECKING, Any

from tfdist import other_names
from tfdist.strategies import require_tensorflow

require_tensorflow()

from tfdist.callbacks.broadcast_variables import BroadcastVariables  # noqa: E402
from tfdist.callbacks.commit_state import CommitState  # noqa: E402
from tfdist.callbacks.communication import Communication  # noqa: E402
from tfdist.callbacks.gradient_noise import GradientDiversity, GradientNoiseScale  # noqa: E402
from tfdist.callbacks.learning_rate_scaling import LearningRateScaling  # noqa: E402
from tfdist.callbacks.metric_average import MetricAverage  # noqa: E402
from tfdist.callbacks.staleness_report import StalenessReport  # noqa: E402
from tfdist.callbacks.timeline import Timeline  # noqa: E402

__all__ = [
    "BroadcastVariables",
    "CommitState",
    "Communication",
    "GradientDiversity",
    "GradientNoiseScale",
    "LearningRateScaling",
    "MetricAverage",
    "StalenessReport",
    "Timeline",
]


if not TYPE_CHECKING:  # with it, type checkers would accept every name as public

    def __getattr__(name: str) -> Any:
        raise other_names.missing(__name__, name)
