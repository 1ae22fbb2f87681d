"""Exchanges of weights in parts, each while the next steps are computed."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.local_sgd.intervals import Interval


@dataclass(frozen=True)
class Streaming:
    """How weights are exchanged in a round: all at once, unless this says otherwise.

    Args:
        fragments: in how many parts they are exchanged, in turn, at equal intervals.
        delay: for how many steps the exchange of a fragment is under way, while these are computed; below
            ``sync_every`` / ``fragments``.

    Raises:
        ValueError: one is out of its range.

    References:
        Douillard et al., *Streaming DiLoCo with overlapping communication*, 2025.
    """

    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("fragments", self.fragments, 1), ("delay", self.delay, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Streaming({name}=…) is a number from {least}; got {value!r}")

    def check(self, interval: Interval) -> None:
        """Checks that exchanges end before the next ones begin.

        Args:
            interval: the steps of a round.

        Raises:
            ValueError: they do not.
        """
        spacing = max(1, interval.least // self.fragments)
        if self.delay and self.delay >= spacing:
            raise ValueError(
                f"{self}: an exchange is to end before the next one begins, and rounds of {interval.least} steps in "
                f"{self.fragments} fragment(s) begin one every {spacing} steps: choose a delay below {spacing}"
            )
        if interval.least < self.fragments:
            raise ValueError(f"{self}: a round has only {interval.least} steps, one for each fragment at least")
