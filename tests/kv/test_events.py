"""KV events: a subscriber that applies them knows what every group's prefix cache holds."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from headrace.kv import CacheIdentity, KVCacheManager, SequenceBlocks
from headrace.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, events_of
from headrace.kv.identity import SparseIdentity
from headrace.kv.prefix_cache import Change
from kv.test_kv_manager import SIZE, TOKENS, image, make, start


def recorded(kv: KVCacheManager, changes: list[Change]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Through the bytes that a subscriber gets."""
    batch = EventBatch(1.0, events_of(changes, kv.block_size, kv.groups), 0)
    changes.clear()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch).events


class Subscriber:
    """The caches as the events tell: per group, hash -> (parent, tokens)."""

    def __init__(self, groups: int) -> None:
        self.blocks: list[dict[bytes, tuple[bytes | None, tuple[int, ...]]]] = [{} for _ in range(groups)]

    def apply(self, kv: KVCacheManager, changes: list[Change]) -> None:
        for event in recorded(kv, changes):
            match event:
                case BlockStored():
                    assert len(event.token_ids) == SIZE * len(event.block_hashes) == SIZE * len(event.extra_keys)
                    parent, mine = event.parent_block_hash, self.blocks[event.group_idx]
                    for place, name in enumerate(event.block_hashes):
                        assert name not in mine, "stored twice"
                        mine[name] = parent, tuple(event.token_ids[place * SIZE : (place + 1) * SIZE])
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.blocks[event.group_idx][name]
                case AllBlocksCleared():
                    for mine in self.blocks:
                        mine.clear()

    def check(self, kv: KVCacheManager) -> None:
        for mine, pool in zip(self.blocks, kv.pools, strict=True):
            truth = {}
            for key in pool.index._keys.values():
                parent = key.parent.digest if key.parent is not None and key.index > 0 else None
                truth[key.digest] = parent, tuple(array("q", key.payload[: 8 * SIZE]))
            assert mine == truth


@pytest.mark.parametrize("windows", [(None,), (None, 8), (6, 14)])
def test_a_subscriber_knows_the_cache(windows: tuple[int | None, ...]) -> None:
    rng = random.Random(len(windows))
    kv = make(*windows, num_blocks=12, widths=tuple(range(1, len(windows) + 1)))
    changes, subscriber = kv.record_changes(), Subscriber(len(windows))
    held: list[SequenceBlocks] = []
    stored = removed = 0
    for number in range(600):
        kind = rng.random()
        if kind < 0.55 and len(held) < 3:
            tokens = [rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
            blocks = kv.open(number, tokens, CacheIdentity(cache_salt=rng.choice([None, None, "mine"])))
            hit = kv.match(blocks)
            if kv.fits(blocks, hit, len(tokens), len(tokens)):
                kv.attach(blocks, hit)
                if kv.allocate(blocks, len(tokens)) is not None:
                    kv.advance(blocks, len(tokens))
                held.append(blocks)
        elif kind < 0.97 and held:
            kv.free(held.pop(rng.randrange(len(held))), None)
        elif kind > 0.99:
            kv.reset_prefix_cache()
        stored += sum(change.stored for change in changes)
        removed += sum(change.key is not None and not change.stored for change in changes)
        kv.take_moves()
        subscriber.apply(kv, changes)
        subscriber.check(kv)
    assert stored > 100 and removed > 50


def test_blocks_of_one_history_are_one_event() -> None:
    kv = make(None, 8)
    changes = kv.record_changes()
    start(kv, 1, TOKENS[:8])
    full, window = sorted(recorded(kv, changes), key=lambda event: event.group_idx)
    assert isinstance(full, BlockStored) and isinstance(window, BlockStored)
    assert full.token_ids == window.token_ids == TOKENS[:8] and full.parent_block_hash is None
    assert (full.medium, full.block_size, full.extra_keys) == ("GPU", SIZE, [None, None])
    assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    start(kv, 2, TOKENS[:12])
    later = recorded(kv, changes)
    assert {event.parent_block_hash for event in later} == {full.block_hashes[-1]}
    assert all(event.token_ids == TOKENS[8:12] for event in later)


def test_what_kv_depends_on_beside_tokens_is_told() -> None:
    kv = make()
    changes = kv.record_changes()
    start(kv, 1, TOKENS[:12], image(4, 6), cache_salt="mine")
    (event,) = recorded(kv, changes)
    salt, cat, none = event.extra_keys
    assert salt == ("mine",) and none is None and cat is not None
    kv.bump_weight_version()
    changes.clear()
    start(kv, 2, TOKENS[:8], image(4, 6, "dog"))
    (event,) = recorded(kv, changes)
    assert event.extra_keys[0] is None and event.extra_keys[1] not in (None, cat)


def test_nothing_is_recorded_unless_asked_for() -> None:
    kv = make()
    start(kv, 1, TOKENS)
    assert kv.pools[0].index._changes is None
    changes = kv.record_changes()
    kv.reset_prefix_cache()
    assert [type(event) for event in recorded(kv, changes)] == [AllBlocksCleared]


def test_what_a_root_depends_on_is_named() -> None:
    assert CacheIdentity.extra_keys(CacheIdentity(weight_version=3).root()) == []
    sparse = SparseIdentity(block=128, prompt_len=300, decision=b"\x01\x02", by_length=True)
    identity = CacheIdentity(cache_salt="salt", adapter="adapter", attention_mode="xattn", sparse=sparse)
    assert CacheIdentity.extra_keys(identity.root()) == ["salt", "adapter", "xattn", "0102", "300"]


def test_blocks_of_an_adapter_have_its_number() -> None:
    """Of its content: all blocks that it computed, the first and those behind it."""
    kv = make()
    changes = kv.record_changes()
    for seq_id, identity in enumerate(({"adapter": "ffffffffffffffff0000000000000007"}, {})):
        first, _ = start(kv, seq_id, TOKENS[:8], **identity)
        kv.allocate(first, 12)
        first.token_ids += TOKENS[8:12]
        kv.advance(first, 12)
    stored = [(event.lora_id, len(event.block_hashes)) for event in recorded(kv, changes) if isinstance(event, BlockStored)]
    assert stored == [(7, 3), (None, 3)]
