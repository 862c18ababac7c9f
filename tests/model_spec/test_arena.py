"""The arena's arithmetic."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model_spec import Arena, CacheGroup, block_sizes

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(sizes, st.data())
def test_it_holds_what_it_was_made_for_and_nothing_smaller_does(block_bytes: list[int], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 9)) for _ in block_bytes]
    arena = Arena.holding(block_bytes, counts)
    needed = sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    least = min(block_bytes)
    assert needed <= arena.capacity < needed + least and arena.nbytes % least == 0
    smaller = Arena(arena.nbytes - least, tuple(block_bytes))
    assert smaller.capacity < needed or needed == 0
    assert arena.num_blocks == tuple(arena.nbytes // size for size in block_bytes)
    assert arena.reserved == max(block_bytes) and sorted(arena.order) == list(range(len(block_bytes)))
    if len(block_bytes) < 3:
        assert arena.capacity == arena.nbytes - arena.reserved


@given(sizes, st.integers(0, 3000))
def test_fitted_is_the_largest_with_nothing_over(block_bytes: list[int], nbytes: int) -> None:
    arena = Arena(0, tuple(block_bytes)).fitted(nbytes)
    assert nbytes - min(block_bytes) < arena.nbytes <= nbytes and arena.nbytes % min(block_bytes) == 0


def test_blocks_end_aligned_only_where_layers_differ_in_it() -> None:
    """Runs of 48 and 20 bytes: the longer ones come first, and every block begins at a multiple of 16."""
    group = CacheGroup(0, None, (0, 1, 2), 20 + 48 + 20, (20, 48, 20))
    assert group.block_bytes(1) == 96 and group.layer_offsets(1) == (48, 0, 68)
    assert group.block_bytes(4) == 352 and group.layer_offsets(4) == (192, 0, 272)
    odd = CacheGroup(1, 8, (3, 4), 24, (20, 4))
    assert odd.block_bytes(1) == 24
    assert block_sizes((group, odd), 1) == (96, 24)
    assert block_sizes((group,), 1) == (88,)
