"""What all messages of the rendezvous have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=str.lower, tag_field="type"):
    """Base of all messages."""
