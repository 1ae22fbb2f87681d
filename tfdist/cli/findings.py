"""What `tfdist doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is, as it is printed."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: how bad it is.
        subject: what it is about.
        text: what was found.
        advice: what to do about it, where there is something to do.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""
