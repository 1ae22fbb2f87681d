"""Local SGD: processes train on their own for some steps, then bring their weights together.

What a round is made of: when it ends (`intervals`), which weights it has (`fragments`), how they are exchanged
(`exchanges`, `streaming`), and what comes of them (`rules`). `rounds` is the course of them all, for one optimizer.
`tfdist.LocalSGDStrategy` trains in this way.
"""

from tfdist.local_sgd.intervals import Every, Growing, Interval, QuadraticRule
from tfdist.local_sgd.rules import Averaging, Elastic, Outer, Rule
from tfdist.local_sgd.streaming import Streaming

__all__ = ["Averaging", "Elastic", "Every", "Growing", "Interval", "Outer", "QuadraticRule", "Rule", "Streaming"]
