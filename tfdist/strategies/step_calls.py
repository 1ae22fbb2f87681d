"""What processes tell each other in each step of `fit` and `evaluate`, besides gradients."""

from __future__ import annotations

from typing import NamedTuple


class StepCalls(NamedTuple):
    """The collectives of a step that can be left out where all processes have agreed on what they do.

    Attributes:
        counts_batches: whether processes count in each step who has another batch, and of how many samples. If not, all
            have the same number of batches, of the same numbers of samples, and nobody ends the steps early.
        compares_samples: whether each process adds up the samples of batches that are not counted, to compare the sums
            when the epoch ends.
        merges_logs: whether the logs of each step are those of all processes. If not, they are the process's own until
            the epoch ends.
    """

    counts_batches: bool = True
    compares_samples: bool = False
    merges_logs: bool = True
