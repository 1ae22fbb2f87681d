"""The base class of the rendezvous messages."""

from __future__ import annotations

import msgspec


class RendezvousMessage(msgspec.Struct, frozen=True, tag=str.lower, tag_field="type"):
    """Base class of all rendezvous messages."""
