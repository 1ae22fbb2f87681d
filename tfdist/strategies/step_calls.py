"""The collectives of each step of `fit` and `evaluate`, besides those of gradients."""

from __future__ import annotations

from typing import NamedTuple


class StepCalls(NamedTuple):
    """The collectives of a step that can be left out where all processes have agreed on their data and callbacks.

    Attributes:
        counts_batches: whether processes count in each step the replicas that have another batch, and the samples. If
            not, all have the same number of batches, with the same numbers of samples, and none ends the steps early;
            or each takes its steps on its own.
        compares_samples: whether each process adds up the samples of batches that are not counted, to compare the sums
            when the epoch ends.
        merges_logs: whether the logs of each step are those of all processes. If not, they are the process's own until
            the epoch ends.
    """

    counts_batches: bool = True
    compares_samples: bool = False
    merges_logs: bool = True
