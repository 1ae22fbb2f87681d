"""The findings of `tfdist doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a finding, as it is printed."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: severity of the finding.
        subject: name of the checked subject.
        text: description of the finding.
        advice: advice to the user; empty if there is nothing to do.
    """

    level: Severity
    subject: str
    text: str
    advice: str = ""
