"""Tagged: messages between processes, as msgspec encodes them."""

from __future__ import annotations

import msgspec


class Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array of the fields behind the name of the class, by which a union of messages is decoded."""
