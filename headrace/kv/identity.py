"""CacheIdentity and Item: what a token's KV depends on besides token ids."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Item(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of a prompt that are placeholders for content: an image, a video, a sound."""

    start: int
    end: int
    atomic: bool
    """Chunks and prefix hits never end inside it."""
    bidirectional: bool
    """The item's tokens attend to each other both ways. Such an item must be atomic."""
    content_hash: str
    """Hash of everything that the item's features depend on: content, shape, frame sampling and processor options."""
    encoder_tokens: int = 0
    """Cost of encoding it, from a step's encoder budget; 0: it needs no encoder."""


class SparseIdentity(NamedTuple):
    """Properties of a sparsely attending prompt, in addition to the name of its mode, on which its KV depends.

    Key blocks are selected for whole blocks of queries. So a token's KV depends on the prompt's tokens up to the end of its
    block of the sparse grid; and tokens behind the prompt attend densely.
    """

    block: int
    """Tokens of a block of the sparse grid."""
    prompt_len: int
    decision: bytes | None
    """Decision of the model's router; None: not known yet."""
    by_length: bool = False
    """Blocks are selected by a rule that depends on the prompt's length."""

    def border(self, end: int) -> int:
        """The end of the tokens that the KV of tokens up to ``end`` depends on."""
        return min(-(-end // self.block) * self.block, self.prompt_len)

    def uncut(self, boundary: int) -> bool:
        return boundary % self.block == 0 or boundary >= self.prompt_len


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
    sparse: SparseIdentity | None = None
    """None: the prompt attends densely."""

    @property
    def known(self) -> bool:
        """False while the KV depends on what is not known yet: then its blocks have no keys."""
        return self.sparse is None or self.sparse.decision is not None

    def root(self) -> bytes:
        """The payload of the key that precedes every first block."""
        decision, length = None, None
        if self.sparse is not None:
            decision, length = self.sparse.decision, self.sparse.prompt_len if self.sparse.by_length else None
        fields = (self.cache_salt, self.weight_version, self.adapter, self.attention_mode, decision, length)
        return msgspec.msgpack.encode(fields)

    @staticmethod
    def extra_keys(root: bytes) -> list[str]:
        """Returns everything but tokens and weights on which the KV of a sequence with this root depends; usually
        empty."""
        salt, _, adapter, mode, decision, length = msgspec.msgpack.decode(root)
        return [part for part in (salt, adapter, mode, decision and decision.hex(), length and str(length)) if part]

    @staticmethod
    def adapter_number(root: bytes) -> int | None:
        """Returns the low 63 bits of the digest of the adapter of a sequence with this root; None: the base model."""
        adapter = msgspec.msgpack.decode(root)[2]
        return None if adapter is None else int(adapter, 16) & (2**63 - 1)

    def block(self, token_ids: Sequence[int], start: int, end: int) -> bytes:
        """The payload of the key of the block of tokens ``[start, end)``.

        The first tokens of a bidirectional item attend to its last, which may lie in a later block, so they are included.
        """
        payload = array("q", token_ids[start:end]).tobytes()
        for item in self.items:
            if start <= item.start < end:
                behind = token_ids[end : item.end] if item.bidirectional else []
                payload += msgspec.msgpack.encode((item.start, item.end, item.bidirectional, item.content_hash, behind))
        if self.sparse is not None:
            border = self.sparse.border(end)
            ends_here = border < -(-end // self.sparse.block) * self.sparse.block
            payload += msgspec.msgpack.encode((token_ids[end:border], border if ends_here else None))
        return payload

    def uncut(self, boundary: int) -> bool:
        """True if a sequence can start at ``boundary``: it cuts no atomic item and no block of the sparse grid."""
        if self.sparse is not None and not self.sparse.uncut(boundary):
            return False
        return not any(item.atomic and item.start < boundary < item.end for item in self.items)
