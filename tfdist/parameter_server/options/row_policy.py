"""The policy that decides which keys of a table get a row, and which rows are evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tfdist import whole_numbers


@dataclass(frozen=True)
class RowPolicy:
    """Decides when a key gets a row, and when it loses it. By default every key has its row forever.

    A key is *used* by a lookup of training that contains it, and a row also by an update. Several occurrences in one
    lookup are one use: workers may send a key once or as often as it occurs in the batch. Time is counted in updates.

    Attributes:
        admit_after: number of the use that makes the row; 1 makes it at the first use. With more, rare keys take no
            row; their uses are counted exactly, in about 40 bytes a key (the counter filter of DeepRec).
        evict_after: maximum number of updates without a use (``steps_to_live`` of DeepRec). Beyond it, rows are
            evicted, and counts of keys without a row are forgotten. A search for both runs every
            ``evict_after`` // 8 updates. None for no limit.
        max_rows: maximum number of rows, and of keys without a row that are counted. A full table makes room for the
            new rows and for ``max_rows`` // 16 more, so that it is not searched in each step. None for no limit.
        evict_first: rows that ``max_rows`` evicts: the "least_recently_used" rows (of these the least used), or the
            "least_used" ones (of these the least recently used). A lookup never evicts the rows of its own keys; if it
            has more keys than ``max_rows``, the highest ones get no row.

    Raises:
        ValueError: a number is too low, or ``evict_first`` unknown.
    """

    admit_after: int = 1
    evict_after: int | None = None
    max_rows: int | None = None
    evict_first: Literal["least_recently_used", "least_used"] = "least_recently_used"

    def __post_init__(self) -> None:
        for name in ("admit_after", "evict_after", "max_rows"):
            value = getattr(self, name)
            if name == "admit_after" or value is not None:
                whole_numbers.check(f"RowPolicy({name}=…)", value)
        if self.evict_first not in ("least_recently_used", "least_used"):
            raise ValueError(
                f'RowPolicy(evict_first=…) must be "least_recently_used" or "least_used"; got {self.evict_first!r}'
            )

    def is_time_to_search(self, now: int) -> bool:
        """Returns whether rows that were not used for long are evicted after update number ``now``."""
        return self.evict_after is not None and now % max(1, self.evict_after // 8) == 0

    def expired(self, last_used: np.ndarray, now: int) -> np.ndarray:
        """Returns the slots that were not used for more than ``evict_after`` updates.

        Args:
            last_used: by slot, the number of updates at its last use.
            now: current number of updates.
        """
        assert self.evict_after is not None
        return np.flatnonzero(last_used < now - self.evict_after)

    def surplus(
        self,
        keys: np.ndarray,
        uses: np.ndarray,
        last_used: np.ndarray,
        new: int,
        kept: np.ndarray,
    ) -> np.ndarray:
        """Returns the slots to evict so that ``max_rows`` leaves room for new rows, whatever the order of slots.

        Args:
            keys: by slot, its key.
            uses: by slot, its number of uses.
            last_used: by slot, the number of updates at its last use.
            new: number of new rows.
            kept: slots that must stay; they may repeat.

        Returns:
            Distinct slots; too few if too many must stay.
        """
        if self.max_rows is None or len(keys) + new <= self.max_rows:
            return np.empty(0, np.int64)
        may_go = np.ones(len(keys), np.bool_)
        may_go[kept] = False
        slots = np.flatnonzero(may_go)
        number = min(len(slots), len(keys) + new - self.max_rows + self.max_rows // 16)
        scores = (last_used, uses) if self.evict_first == "least_recently_used" else (uses, last_used)
        return _lowest(number, slots, (*scores, keys))


def _lowest(number: int, slots: np.ndarray, scores: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the slots with the lowest scores: first scores are compared, and where they are equal, the next ones."""
    if number == 0 or number == len(slots):
        return slots[:number]
    score = scores[0][slots]
    bound = np.partition(score, number - 1)[number - 1]
    below = slots[score < bound]
    return np.concatenate([below, _lowest(number - len(below), slots[score == bound], scores[1:])])
