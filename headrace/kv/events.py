"""KV events: what the prefix caches store and remove, for routers, in the schema of vLLM 0.26."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from headrace.kv.identity import CacheIdentity
from headrace.kv.prefix_cache import BlockKey, Change
from headrace.model_spec import CacheGroup

MEDIUM = "GPU"
"""Name of the tier of the engine's own cache, on every device."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Consecutive blocks of one token history can be found."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """None: the first block begins the history."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    lora_id: int | None
    """Number of the adapter: of its content, whatever its name. None: the base model."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None]
    """Per block, what its KV depends on besides the tokens up to its end: a salt as it is, the rest as a hash."""
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None
    num_tokens: int | None = None
    """Number of tokens that a snapshot of states has absorbed, of which those of the block are the last; it is of use where the
    KV of all of them is found too. None: the event is of blocks of KV."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """The blocks can no longer be found."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block of any group can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    """``time.time()``"""
    events: list[Event]
    data_parallel_rank: int


def events_of(changes: Sequence[Change], block_size: int, groups: Sequence[CacheGroup]) -> list[Event]:
    """Converts changes to events: neighbours in a group are joined, and the groups are cleared together. The group behind
    ``groups`` is that of snapshots of states, each of which is an event."""
    events: list[Event] = []
    latest: dict[int, BlockStored | BlockRemoved] = {}
    """Latest event since the last clear, by group."""
    for group, key, stored in changes:
        last = latest.get(group)
        if key is None:
            latest.clear()
            if not events or not isinstance(events[-1], AllBlocksCleared):
                events.append(AllBlocksCleared())
        elif not stored:
            if not isinstance(last, BlockRemoved):
                last = latest[group] = BlockRemoved(block_hashes=[], medium=MEDIUM, group_idx=group)
                events.append(last)
            last.block_hashes.append(key.digest)
        else:
            parent = key.parent.digest if key.parent is not None and key.index else None
            if not isinstance(last, BlockStored) or last.block_hashes[-1] != parent or group == len(groups):
                last = latest[group] = _begin(key, parent, block_size, group, groups)
                events.append(last)
            last.block_hashes.append(key.digest)
            last.token_ids += array("q", key.payload[: 8 * block_size])
            last.extra_keys.append(_extra(key, block_size))
    return events


def _begin(key: BlockKey, parent: bytes | None, block_size: int, group: int, groups: Sequence[CacheGroup]) -> BlockStored:
    is_state = group == len(groups)
    window, kind = None, "mamba"
    if not is_state:
        window, chunked = groups[group].window, groups[group].chunked
        kind = "full_attention" if window is None else "chunked_local_attention" if chunked else "sliding_window"
    return BlockStored(
        block_hashes=[],
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_size,
        lora_id=_adapter(key),
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[],
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        num_tokens=(key.index + 1) * block_size if is_state else None,
    )


def _adapter(key: BlockKey) -> int | None:
    """The number of the adapter that computed a block."""
    while key.parent is not None:
        key = key.parent
    return CacheIdentity.adapter_number(key.payload)


def _extra(key: BlockKey, block_size: int) -> tuple[str, ...] | None:
    found = CacheIdentity.extra_keys(key.parent.payload) if key.parent is not None and not key.index else []
    if rest := key.payload[8 * block_size :]:
        found.append(hashlib.blake2b(rest, digest_size=16).hexdigest())
    return tuple(found) or None
