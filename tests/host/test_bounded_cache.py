"""The cache drops what was not used for longest, by number and by size."""

from __future__ import annotations

from headrace.host.bounded_cache import BoundedCache


def kept(cache: BoundedCache[str, int], names: str) -> str:
    return "".join(name for name in names if cache.get(name) is not None)


def test_few_entries_are_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    for name in ("a", "b", "a", "c"):
        cache.put(name, 1)
    assert kept(cache, "abc") == "ac"


def test_what_is_read_stays() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 1)
    assert cache.get("a") == 1
    cache.put("c", 1)
    assert kept(cache, "abc") == "ac"


def test_bytes_are_counted_once_an_entry() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_bytes=10, size=lambda name, size: size)
    for name, size in (("a", 4), ("b", 4), ("b", 5), ("b", 6)):
        cache.put(name, size)
    assert kept(cache, "ab") == "ab"
    cache.put("c", 5)
    assert kept(cache, "abc") == "c"
    cache.put("d", 11)
    assert kept(cache, "abcd") == ""
