from __future__ import annotations

import pytest
from support.cache_config import cache_holding

from headrace.errors import EngineError
from headrace.kv import NULL_BLOCK, CacheIdentity, Item, KVCacheManager, SequenceBlocks
from headrace.model_spec import CacheGroup

SIZE = 4


def make(
    *windows: int | None, num_blocks: int | tuple[int, ...] = 32, caching: bool = True, widths: tuple[int, ...] | None = None
) -> KVCacheManager:
    """Takes as much memory as the given blocks of each group, null block included; ``widths`` are bytes a token."""
    windows = windows or (None,)
    counts = (num_blocks,) * len(windows) if isinstance(num_blocks, int) else num_blocks
    widths = widths or (1,) * len(windows)
    groups = tuple(CacheGroup(i, window, (i,), width) for i, (window, width) in enumerate(zip(windows, widths, strict=True)))
    return KVCacheManager(
        cache_holding(
            [count - 1 for count in counts], block_size=SIZE, groups=groups, enable_prefix_caching=caching, dtype="float32"
        )
    )


def image(start: int, end: int, content_hash: str = "cat", *, bidirectional: bool = True) -> Item:
    return Item(start, end, bidirectional, bidirectional, content_hash)


def start(kv: KVCacheManager, seq_id: int, tokens: list[int], *items: Item, **identity: str) -> tuple[SequenceBlocks, int]:
    """Computes all tokens in one collected step; returns the blocks and the hit."""
    blocks = kv.open(seq_id, tokens, CacheIdentity(items=items, **identity))
    hit = kv.match(blocks)
    kv.attach(blocks, hit)
    assert kv.allocate(blocks, len(tokens)) is not None
    kv.advance(blocks, len(tokens))
    kv.check_integrity()
    return blocks, hit.num_tokens


def hit_of(kv: KVCacheManager, tokens: list[int], *items: Item, **identity: str) -> int:
    return kv.match(kv.open(99, tokens, CacheIdentity(items=items, **identity))).num_tokens


TOKENS = list(range(100, 120))


def test_a_hit_shares_blocks_and_leaves_the_last_token_to_compute() -> None:
    kv = make()
    first, hit = start(kv, 1, TOKENS[:8])
    assert hit == 0
    assert hit_of(kv, TOKENS[:8]) == 4
    assert hit_of(kv, TOKENS[:9]) == 8
    assert hit_of(kv, TOKENS[:4]) == 0
    second, hit = start(kv, 2, TOKENS[:12])
    assert hit == 8
    assert second.tables[0][:2] == first.tables[0]
    assert kv.pools[0].owners(first.tables[0][0]) == {1, 2}
    assert kv.num_used == 3


def test_the_plan_gets_shared_blocks_with_the_first_allocation_and_each_block_once() -> None:
    kv = make()
    first, _ = start(kv, 1, TOKENS[:8])
    kv.free(first, None)
    blocks = kv.open(2, TOKENS[:20], CacheIdentity())
    hit = kv.match(blocks)
    kv.attach(blocks, hit)
    new = kv.allocate(blocks, 10)
    assert new is not None
    assert new[0][:2] == tuple(hit.blocks[0])
    assert len(new[0]) == 3
    assert kv.allocate(blocks, 12) == ((),)
    more = kv.allocate(blocks, 13)
    assert more is not None
    assert (*new[0], *more[0]) == tuple(blocks.tables[0])


def test_prefixes_outlive_their_sequence_until_evicted_tail_first() -> None:
    kv = make(num_blocks=6)
    blocks, _ = start(kv, 1, TOKENS[:16])
    kv.free(blocks, None)
    assert kv.num_used == 0
    assert hit_of(kv, TOKENS) == 16
    other, _ = start(kv, 2, [7] * 12)
    assert hit_of(kv, TOKENS) == 8
    kv.free(other, None)


def test_blocks_are_published_only_once_collected() -> None:
    kv = make()
    blocks = kv.open(1, TOKENS, CacheIdentity())
    kv.attach(blocks, kv.match(blocks))
    kv.allocate(blocks, 12)
    assert hit_of(kv, TOKENS) == 0
    kv.advance(blocks, 7)
    assert hit_of(kv, TOKENS) == 4
    kv.advance(blocks, 12)
    assert hit_of(kv, TOKENS) == 12


@pytest.mark.parametrize("field", ["cache_salt", "adapter", "attention_mode"])
def test_what_applies_to_all_tokens_sets_prefixes_apart(field: str) -> None:
    kv = make()
    start(kv, 1, TOKENS, **{field: "a"})
    assert hit_of(kv, TOKENS) == 0
    assert hit_of(kv, TOKENS, **{field: "b"}) == 0
    assert hit_of(kv, TOKENS, **{field: "a"}) == 16


def test_a_hit_never_ends_inside_an_atomic_item() -> None:
    kv = make()
    cat = image(6, 18)
    start(kv, 1, TOKENS, cat)
    assert hit_of(kv, [*TOKENS[:18], 1, 2, 3], cat) == 4
    assert hit_of(kv, TOKENS, cat) == 4
    assert hit_of(kv, TOKENS) == 4
    start(kv, 2, [*TOKENS, 1, 2, 3], cat)
    assert hit_of(kv, [*TOKENS, 5], cat) == 20


def test_a_hit_may_end_inside_an_item_that_is_not_atomic() -> None:
    kv = make()
    cat = image(6, 19, bidirectional=False)
    start(kv, 1, TOKENS, cat)
    assert hit_of(kv, TOKENS, cat) == 16


def test_tokens_of_a_bidirectional_item_beyond_the_block_tell_blocks_apart() -> None:
    kv = make()
    start(kv, 1, TOKENS, image(2, 7))
    assert hit_of(kv, TOKENS, image(2, 7)) == 16
    changed = TOKENS.copy()
    changed[6] = 5
    assert hit_of(kv, changed, image(2, 7)) == 0
    assert hit_of(kv, TOKENS) == 0


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_same_placeholders_share_up_to_the_first_item_that_differs(bidirectional: bool) -> None:
    kv = make()
    tokens = [1, 2, 3, 4, 5, *[9] * 6, 6, 7, *[9] * 4, 8, 8, 8, 8]
    cat, dog = (image(5, 11, name, bidirectional=bidirectional) for name in ("cat", "dog"))
    fox, owl = (image(13, 17, name, bidirectional=bidirectional) for name in ("fox", "owl"))
    start(kv, 1, tokens, cat, fox)
    assert hit_of(kv, tokens, cat, fox) == 20
    assert hit_of(kv, tokens, cat, owl) == 12
    assert hit_of(kv, tokens, dog, fox) == 4
    assert hit_of(kv, tokens) == 4


def test_new_weights_find_nothing_old_and_running_sequences_publish_nothing_more() -> None:
    kv = make()
    done, _ = start(kv, 1, TOKENS)
    running = kv.open(2, [5] * 12, CacheIdentity())
    kv.attach(running, kv.match(running))
    kv.allocate(running, 12)
    kv.advance(running, 4)
    assert kv.bump_weight_version() == 1
    kv.advance(running, 12)
    assert hit_of(kv, TOKENS) == 0
    assert hit_of(kv, [5] * 12) == 0
    start(kv, 3, TOKENS)
    assert hit_of(kv, TOKENS) == 16
    for blocks in (done, running):
        kv.free(blocks, None)
    kv.check_integrity()


def test_a_waiting_sequence_matched_before_new_weights_is_matched_again() -> None:
    kv = make()
    waiting = kv.open(9, TOKENS, CacheIdentity())
    start(kv, 1, TOKENS)
    assert kv.match(waiting).num_tokens == 16
    kv.bump_weight_version()
    assert kv.match(waiting).num_tokens == 0
    start(kv, 2, TOKENS)
    assert kv.match(waiting).num_tokens == 16


def test_reset_says_whether_there_is_a_cache() -> None:
    kv = make()
    start(kv, 1, TOKENS)
    assert kv.reset_prefix_cache()
    assert hit_of(kv, TOKENS) == 0
    assert not make(caching=False).reset_prefix_cache()


def test_after_a_reset_running_sequences_publish_nothing_more() -> None:
    kv = make(4)
    running = kv.open(1, TOKENS, CacheIdentity())
    kv.attach(running, kv.match(running))
    kv.allocate(running, 20)
    kv.advance(running, 8)
    kv.reset_prefix_cache()
    kv.advance(running, 16)
    assert hit_of(kv, TOKENS) == 0, "a window needs only the last block, which was computed before the reset"


def test_without_caching_nothing_is_found() -> None:
    kv = make(caching=False)
    start(kv, 1, TOKENS)
    assert hit_of(kv, TOKENS) == 0
    assert len(kv.pools[0].index) == 0


def test_a_window_gives_blocks_back_as_it_passes() -> None:
    kv = make(None, 6)
    blocks, _ = start(kv, 1, TOKENS[:16])
    # Token 16 sees positions 11..16: blocks 0 and 1 are past.
    assert blocks.tables[1][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in blocks.tables[0]
    assert NULL_BLOCK not in blocks.tables[1][2:]
    assert kv.num_used == 4 + 2
    assert [len(table) for table in blocks.tables] == [4, 4]


def test_a_window_waits_for_steps_in_flight() -> None:
    kv = make(4)
    blocks = kv.open(1, TOKENS, CacheIdentity())
    kv.attach(blocks, kv.match(blocks))
    kv.allocate(blocks, 8)
    kv.allocate(blocks, 16)
    kv.advance(blocks, 8)
    assert blocks.tables[0][0] == NULL_BLOCK
    assert NULL_BLOCK not in blocks.tables[0][1:]


def test_a_window_hit_needs_only_what_the_window_sees() -> None:
    kv = make(None, 6, num_blocks=(32, 5))
    blocks, _ = start(kv, 1, TOKENS[:16])
    kv.free(blocks, None)
    hit = kv.match(kv.open(2, TOKENS, CacheIdentity()))
    assert hit.num_tokens == 16
    assert hit.blocks[1][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert all(hit.blocks[1][2:])
    # Evict one of the visible blocks of the window group: the full group alone is not a hit there.
    for _ in range(3):
        kv.pools[1].evict()
    assert hit_of(kv, TOKENS) < 16


def test_allocation_is_all_or_nothing_over_groups() -> None:
    kv = make(None, 100, num_blocks=(4, 4), widths=(3, 1))
    blocks = kv.open(1, TOKENS, CacheIdentity())
    kv.attach(blocks, kv.match(blocks))
    assert kv.allocate(blocks, 16) is None
    assert kv.num_used == 0
    assert kv.room(blocks, 0) == 12
    assert kv.allocate(blocks, 12) is not None
    kv.check_integrity()


def test_fits_counts_blocks_that_a_hit_takes_out_of_the_free_ones() -> None:
    kv = make(num_blocks=6)
    blocks, _ = start(kv, 1, TOKENS[:8])
    kv.free(blocks, None)
    waiting = kv.open(2, TOKENS, CacheIdentity())
    hit = kv.match(waiting)
    assert hit.num_tokens == 8
    assert kv.fits(waiting, hit, 20, 1)
    start(kv, 3, [1, 2, 3])
    assert not kv.fits(waiting, kv.match(waiting), 20, 1)
    assert kv.fits(waiting, kv.match(waiting), 16, 1)


def test_fork_shares_full_blocks_with_and_without_caching() -> None:
    for caching in (True, False):
        kv = make(caching=caching)
        parent, _ = start(kv, 1, TOKENS[:8])
        boundary = kv.fork_boundary(parent, 8)
        assert boundary == 4
        child = kv.open(2, TOKENS[:8], CacheIdentity())
        kv.fork(parent, child, boundary)
        assert child.tables[0] == parent.tables[0][:1]
        kv.free(parent, None)
        new = kv.allocate(child, 8)
        assert new is not None
        assert new[0] == tuple(child.tables[0])
        kv.advance(child, 8)
        kv.check_integrity()
        kv.free(child, None)
        assert kv.num_used == 0


def test_fork_needs_what_the_child_can_see() -> None:
    kv = make(4)
    parent = kv.open(1, TOKENS, CacheIdentity())
    kv.attach(parent, kv.match(parent))
    parent.keep_from = kv.fork_boundary(parent, len(TOKENS))
    kv.allocate(parent, 20)
    kv.advance(parent, 19)
    assert kv.can_fork(parent, 16)
    child = kv.open(2, TOKENS.copy(), CacheIdentity())
    kv.fork(parent, child, 16)
    assert child.tables[0] == [0, 0, 0, parent.tables[0][3]]
    parent.keep_from = None
    kv.advance(parent, 20)
    assert not kv.can_fork(parent, 16)
    with pytest.raises(EngineError, match="no longer has"):
        kv.fork(parent, kv.open(3, TOKENS.copy(), CacheIdentity()), 16)
    kv.check_integrity()


def test_freed_blocks_wait_for_their_fence() -> None:
    kv = make(None, 6, num_blocks=8)
    blocks, _ = start(kv, 1, TOKENS[:8])
    kv.free(blocks, fence=3)
    assert kv.num_used == kv.num_pending > 0
    assert kv.room(kv.open(2, [], CacheIdentity()), 0) < kv.room(kv.open(2, [], CacheIdentity()), 0, pending=True)
    kv.collected(3)
    assert kv.num_used == 0


def test_too_small_for() -> None:
    assert make(num_blocks=6).too_small_for(20, 1) is None
    assert "need 6 KV blocks of 4 tokens in the cache group 'full', which has 5" in str(make(num_blocks=6).too_small_for(21, 1))
    kv = make(None, 6, num_blocks=(6, 4), widths=(1, 2))
    assert kv.too_small_for(20, 1) is None
    assert "6 in 'full' and 3 in 'window 6'; these are 48 bytes, and all groups share 44" in str(kv.too_small_for(21, 1))
    # What one group does not need is the other's.
    assert kv.too_small_for(16, 4) is None
    assert "5 in 'full' and 4 in 'window 6'" in str(kv.too_small_for(20, 6))


def test_integrity_check_compares_owners_with_tables() -> None:
    kv = make()
    blocks, _ = start(kv, 1, TOKENS)
    blocks.tables[0].pop()
    with pytest.raises(EngineError, match=r"owned by \[1\], but is in the tables of \[\]"):
        kv.check_integrity()
