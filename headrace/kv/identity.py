"""CacheIdentity and Item: what a token's KV depends on besides token ids."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import msgspec


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of a prompt that are placeholders for content: an image, a video, a sound."""

    start: int
    end: int
    atomic: bool
    """Chunks and prefix hits never end inside it."""
    bidirectional: bool
    """Its tokens attend to each other both ways. Such an item must be atomic."""
    content_hash: str
    """Hash of everything that the item's features depend on: content, shape, frame sampling and processor options."""
    encoder_tokens: int = 0
    """Cost of encoding it, from a step's encoder budget; 0: it needs no encoder."""


@dataclasses.dataclass(frozen=True)
class CacheIdentity:
    """Everything that a sequence's KV depends on besides its token ids. Block keys derive from the two.

    The root of the keys covers the fields of the whole sequence. An item is in the key of the block in which it starts, and
    later blocks inherit it; so prompts share the blocks before the first item in which they differ.
    """

    cache_salt: str | None = None
    weight_version: int = 0
    adapter: str | None = None
    """Digest of the adapter's weights, not its name; None: the base model."""
    attention_mode: str = ""
    """Name of the attention mode that computes the KV, where a model has several."""
    items: tuple[Item, ...] = ()
    """Items of the prompt: ascending, disjoint."""

    def root(self) -> bytes:
        """The payload of the key that precedes every first block."""
        return msgspec.msgpack.encode((self.cache_salt, self.weight_version, self.adapter, self.attention_mode))

    def block(self, token_ids: Sequence[int], start: int, end: int) -> bytes:
        """The payload of the key of the block of tokens ``[start, end)``.

        The first tokens of a bidirectional item attend to its last, which may lie in a later block, so they are included.
        """
        payload = array("q", token_ids[start:end]).tobytes()
        for item in self.items:
            if start <= item.start < end:
                behind = token_ids[end : item.end] if item.bidirectional else []
                payload += msgspec.msgpack.encode((item.start, item.end, item.bidirectional, item.content_hash, behind))
        return payload

    def uncut(self, boundary: int) -> bool:
        """True if no atomic item lies on both sides of ``boundary``."""
        return not any(item.atomic and item.start < boundary < item.end for item in self.items)
