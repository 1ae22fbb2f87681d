"""Local SGD: processes train on their own for some steps, then bring their weights together.

What a round is made of: when it ends (`intervals`), which weights it has (`fragments`), how they are exchanged
(`exchanges`), and what comes of them (`rules`). `rounds` is the course of them all, for one optimizer.
`tfdist.LocalSGDStrategy` trains in this way.
"""

from tfdist.local_sgd.intervals import Every, Growing, Interval, QuadraticRule

__all__ = ["Every", "Growing", "Interval", "QuadraticRule"]
