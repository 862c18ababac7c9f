"""Sizes as users write them."""

from __future__ import annotations

import re

from headrace.errors import ConfigError

_FACTORS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PICTURE = re.compile(r"(\d{1,6})x(\d{1,6})")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of "2GiB" (1024 based), "2GB" (1000 based), "1.5 GiB" or a bare number of bytes.

    Raises:
        ValueError: the text is not a size; "2G" is refused because it may mean either base.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write 2GiB (1024 based), 2GB (1000 based) or a number of bytes")
    size = float(match[1]) * factor
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def picture_size(text: str) -> tuple[int, int]:
    """The width and height of --image-size, such as 1024x768. Raises ConfigError."""
    match = _PICTURE.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError(f"must be a width and a height such as 1024x768, not {text!r}", "--image-size")
    return int(match[1]), int(match[2])
