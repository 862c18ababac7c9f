"""Sizes as people write them, and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.units import parse_size
from headrace.errors import human_size, ranges


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5kB", 1500),
        ("0.5MiB", 2**19),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2G", "GiB", "-1GiB", "1.5", "1,5GiB", "2 GiB 3", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (999 * 2**10, "999 KiB"),
        (1000 * 2**10, "0.98 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_human_size(size: int, text: str) -> None:
    assert human_size(size) == text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 2**44))
def test_human_size_is_within_a_hundredth(size: int) -> None:
    number, unit = human_size(size).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * factor == pytest.approx(size, rel=0.01)


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0\N{EN DASH}2, 5, 7\N{EN DASH}8"
