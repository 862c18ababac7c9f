from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import EngineError
from headrace.kv import CacheIdentity, Item, prefix_cache
from headrace.kv.prefix_cache import BlockKey, KeyChain, PrefixIndex, find_hit
from headrace.model_spec import CacheGroup

SIZE = 2


TEXT = CacheIdentity()


def chain(tokens: list[int], identity: CacheIdentity = TEXT) -> KeyChain:
    return KeyChain(identity, tokens, SIZE)


def seen_both_ways(*bounds: tuple[int, int]) -> CacheIdentity:
    return CacheIdentity(items=tuple(Item(start, end, True, True, "cat") for start, end in bounds))


def equal(a: BlockKey, b: BlockKey) -> bool:
    assert (a.digest == b.digest) == a.same_history(b)
    return a.same_history(b)


def test_a_key_is_its_whole_history() -> None:
    ours = chain([1, 2, 3, 4])
    assert equal(ours[1], chain([1, 2, 3, 4, 5])[1])
    assert not equal(ours[1], chain([9, 2, 3, 4])[1])
    assert not equal(ours[1], chain([1, 2, 3, 5])[1])


def test_salt_weights_adapter_and_mode_set_histories_apart() -> None:
    identities = [
        CacheIdentity(), CacheIdentity(""), CacheIdentity("a"), CacheIdentity(None, 1), CacheIdentity("a", 1),
        CacheIdentity(adapter=""), CacheIdentity(adapter="a"), CacheIdentity(attention_mode="a"),
        CacheIdentity(adapter="a", attention_mode="a"), CacheIdentity("a", adapter="a"),
    ]  # fmt: skip
    keys = [chain([1, 2], identity)[0] for identity in identities]
    assert len({key.digest for key in keys}) == len(identities)
    assert equal(chain([1, 2], CacheIdentity("a"))[0], keys[2])


def test_the_first_token_of_a_bidirectional_item_depends_on_its_last() -> None:
    ours = chain([1, 2, 3, 4, 5, 6], seen_both_ways((1, 5)))
    assert not equal(ours[0], chain([1, 2, 3, 4, 5, 6])[0])
    assert not equal(ours[0], chain([1, 2, 3, 4, 9, 6], seen_both_ways((1, 5)))[0])
    assert not equal(ours[0], chain([1, 2, 3, 4, 5, 6], seen_both_ways((1, 4)))[0])
    assert equal(ours[0], chain([1, 2, 3, 4, 5, 9], seen_both_ways((1, 5)))[0])
    assert not equal(ours[2], chain([1, 2, 3, 4, 5, 6])[2])
    # An item that begins later does not matter to the blocks before it.
    assert equal(ours[0], chain([1, 2, 3, 4, 5, 6, 7, 8], seen_both_ways((1, 5), (6, 8)))[0])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], CacheIdentity]:
    """Few tokens and contents, so that many prompts are equal up to some place."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=8, max_size=8))
    bounds = sorted(draw(st.sets(st.integers(0, 8), max_size=4)))
    items = []
    for start, end in zip(bounds[::2], bounds[1::2], strict=False):
        both = draw(st.booleans())
        items.append(Item(start, end, both, both, draw(st.sampled_from("ab"))))
    return tokens, CacheIdentity(items=tuple(items))


def depends_on(tokens: list[int], identity: CacheIdentity, end: int) -> object:
    """Returns everything of which the KV of the tokens before ``end`` is a function."""
    items = [item for item in identity.items if item.start < end]
    seen = max([end, *(item.end for item in items if item.bidirectional)])
    return tokens[:seen], [(item.start, item.end, item.bidirectional, item.content_hash) for item in items]


@settings(max_examples=500, derandomize=True, deadline=None, database=None)
@given(prompts(), prompts(), st.integers(1, 4))
def test_blocks_are_shared_if_and_only_if_their_kv_is_the_same(
    ours: tuple[list[int], CacheIdentity], theirs: tuple[list[int], CacheIdentity], count: int
) -> None:
    same = depends_on(*ours, count * SIZE) == depends_on(*theirs, count * SIZE)
    assert equal(chain(*ours)[count - 1], chain(*theirs)[count - 1]) == same


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(EngineError, match="no key yet"):
        chain([1, 2, 3])[1]


def test_keys_follow_the_tokens_as_they_grow() -> None:
    tokens = [1, 2]
    ours = chain(tokens)
    first = ours[0]
    tokens += [3, 4]
    assert ours[1].parent is first


def test_equal_digests_are_told_apart_by_tokens_and_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_digest", lambda data: b"same")
    index = PrefixIndex()
    mine, parent_differs, tokens_differ = chain([1, 2, 3, 4]), chain([9, 2, 3, 4]), chain([1, 2, 3, 5])
    assert index.put(mine[1], 7) is mine[1]
    assert index.find(mine[1]) == (7, mine[1])
    assert index.find(chain([1, 2, 3, 4])[1]) == (7, mine[1])
    assert index.find(parent_differs[1]) is None
    assert index.find(tokens_differ[1]) is None
    assert index.find(chain([1, 2, 3, 4], CacheIdentity("salt"))[1]) is None
    assert index.put(parent_differs[1], 8) is parent_differs[1]
    assert index.key_of(8) is None
    index.check_integrity()


def test_a_key_known_already_keeps_its_block() -> None:
    index = PrefixIndex()
    first, second = chain([1, 2]), chain([1, 2])
    assert index.put(first[0], 3) is first[0]
    assert index.put(second[0], 4) is first[0]
    assert index.find(second[0]) == (3, first[0])
    index.drop(3)
    assert index.find(second[0]) is None


def test_adopted_keys_end_comparisons_at_once() -> None:
    known, ours = chain(list(range(8))), chain(list(range(8)))
    assert ours[3] is not known[3]
    ours.adopt(2, known[2])
    assert ours[3].parent is known[2]
    assert ours[3].same_history(known[3])


def kind(window: int | None) -> CacheGroup:
    """A cache group with a window, or with chunks of ``-window``."""
    return CacheGroup(0, None if window is None else abs(window), (0,), 1, chunked=window is not None and window < 0)


@pytest.mark.parametrize(
    ("position", "window", "seen"),
    [
        *[(0, None, 0), (99, None, 0), (8, 1, 8), (8, 2, 7), (8, 4, 5), (8, 20, 0)],
        *[(8, -4, 8), (9, -4, 8), (11, -4, 8), (9, -6, 6), (9, -20, 0)],
    ],
)
def test_first_seen_position(position: int, window: int | None, seen: int) -> None:
    group = kind(window)
    assert group.first_seen(position) == seen
    if window is not None:
        first = group.unseen_from(position, abs(window))
        assert group.first_seen(first) >= position > group.first_seen(first - 1)


def brute_force(present: list[list[bool]], groups: list[CacheGroup], most: int) -> int:
    """The longest boundary whose visible blocks are there in every group."""
    for boundary in range(most, 0, -1):
        ok = True
        for there, group in zip(present, groups, strict=True):
            seen_from = group.first_seen(boundary * SIZE)
            ok = ok and all(there[p // SIZE] for p in range(seen_from, boundary * SIZE))
        if ok:
            return boundary
    return 0


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(
    st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 8, 30, -2, -3, -6, -30]), min_size=1, max_size=3),
    st.integers(0, 10),
    st.randoms(use_true_random=False),
)
def test_the_longest_usable_prefix_is_found(windows: list[int | None], most: int, random: object) -> None:
    choose: Callable[[], float] = random.random
    keys, groups = chain(list(range(20))), [kind(window) for window in windows]
    present = [[choose() < 0.7 for _ in range(10)] for _ in windows]
    indexes = [PrefixIndex() for _ in windows]
    for index, there in zip(indexes, present, strict=True):
        for i in range(10):
            if there[i]:
                index.put(keys[i], 100 + i)
    hit = find_hit(indexes, groups, chain(list(range(20))), most, SIZE)
    boundary = brute_force(present, groups, most)
    assert hit.num_tokens == boundary * SIZE
    for blocks, group in zip(hit.blocks, groups, strict=True):
        first = group.first_seen(hit.num_tokens) // SIZE
        assert blocks == [0] * min(first, boundary) + [100 + i for i in range(first, boundary)]
