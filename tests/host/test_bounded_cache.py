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


def test_a_tenant_that_stores_without_end_drops_its_entries_alone() -> None:
    cache: BoundedCache[str, int] = BoundedCache(6, 100, lambda name, size: size)
    for name in "ab":
        cache.put(name, 1, "one")
    for number in range(50):
        cache.put(f"x{number}", 1, "two")
        cache.put(f"y{number}", 30, "two")
    cache.put("huge", 1000, "two")
    assert kept(cache, "ab") == "ab" and cache.get("huge") is None
    assert cache.get("y48") is None, "a value that is larger than all took the place of the others of its tenant"


def test_equal_parts_are_those_of_the_tenants_that_there_are() -> None:
    cache: BoundedCache[str, int] = BoundedCache(4)
    for name in "abcd":
        cache.put(name, 1, "one")
    for name in "ef":
        cache.put(name, 1, "two")
    assert [name for name, _ in cache.items()] == ["c", "d", "e", "f"]
    cache.put("g", 1, "two")
    assert [name for name, _ in cache.items()] == ["c", "d", "f", "g"]


def test_what_two_tenants_use_is_dropped_when_neither_keeps_it() -> None:
    cache: BoundedCache[str, int] = BoundedCache(3)
    cache.put("shared", 1, "one")
    assert cache.get("shared", "two") == 1
    for name in "abcdef":
        cache.put(name, 1, "two")
    assert "shared" in dict(cache.items())
    for name in "ghij":
        cache.put(name, 1, "one")
    assert "shared" not in dict(cache.items())


def test_a_replaced_value_is_counted_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_bytes=10, size=lambda name, size: size)
    cache.put("a", 6, "one")
    assert cache.get("a", "two") == 6
    for _ in range(3):
        cache.put("a", 5, "two")
    cache.put("b", 5, "one")
    assert dict(cache.items()) == {"a": 5, "b": 5}
    cache.put("c", 5, "one")
    assert dict(cache.items()) == {"a": 5, "c": 5}
