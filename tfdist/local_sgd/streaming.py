"""Exchange of weights in fragments, each while the next steps are computed."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist import whole_numbers
from tfdist.local_sgd.intervals import Interval


@dataclass(frozen=True)
class Streaming:
    """The way in which the weights of a round are exchanged; by default all at once.

    Args:
        fragments: number of fragments that are exchanged in turn, at equal intervals.
        delay: number of steps that are computed while the exchange of a fragment is under way; below ``sync_every`` /
            ``fragments``.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Douillard et al., *Streaming DiLoCo with overlapping communication*, 2025.
    """

    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        whole_numbers.check("Streaming(fragments=…)", self.fragments)
        whole_numbers.check("Streaming(delay=…)", self.delay, least=0)

    def check(self, interval: Interval) -> None:
        """Checks that exchanges end before the next ones begin.

        Args:
            interval: number of steps of a round.

        Raises:
            ValueError: exchanges would overlap, or a round has fewer steps than fragments.
        """
        spacing = max(1, interval.least // self.fragments)
        if self.delay and self.delay >= spacing:
            raise ValueError(
                f"{self}: an exchange must end before the next one begins; in rounds of {interval.least} steps with "
                f"{self.fragments} fragment(s), one begins every {spacing} steps: choose a delay below {spacing}"
            )
        if interval.least < self.fragments:
            raise ValueError(
                f"{self}: a round must have at least one step for each fragment; got {interval.least} steps. Use fewer "
                "fragments or longer rounds."
            )
