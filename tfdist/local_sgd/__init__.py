"""Local SGD: processes train on their own for some steps, then combine their weights.

The modules define when a round ends (`intervals`), which weights are exchanged together (`fragments`), how they are
exchanged (`exchanges`, `streaming`), and how they are combined (`rules`). `rounds` schedules all of it for one
optimizer. `tfdist.LocalSGDStrategy` trains in this way.
"""

from tfdist.local_sgd.intervals import Every, Growing, Interval, QuadraticRule
from tfdist.local_sgd.rules import Averaging, Elastic, Outer, Rule
from tfdist.local_sgd.streaming import Streaming

__all__ = ["Averaging", "Elastic", "Every", "Growing", "Interval", "Outer", "QuadraticRule", "Rule", "Streaming"]
