"""TokenRows: data that a request gets back for each token, and that cached blocks keep for later requests."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import EngineError


class TokenRows:
    """Rows of bytes, a token each, from the first token on: the experts that routers chose, as ``RoutedExperts.data``."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._width = 0
        """Bytes of a token."""

    def put(self, start: int, num_tokens: int, data: bytes) -> None:
        """Stores the rows of tokens ``start, start + 1, ...``; those of tokens that are computed again replace earlier ones.

        Raises:
            EngineError: rows are missing.
        """
        self._width = len(data) // num_tokens
        if not data or len(self._data) < start * self._width:
            raise EngineError(f"{len(data)} bytes of the experts of {num_tokens} tokens from {start} on: some are missing")
        self._data[start * self._width : (start + num_tokens) * self._width] = data

    def first(self, num_tokens: int) -> bytes:
        """The rows of the first tokens, as far as there are."""
        return bytes(self._data[: num_tokens * self._width])

    def part(self, start: int, end: int) -> bytes:
        """The rows of some tokens, which are there."""
        return bytes(self._data[start * self._width : end * self._width])

    def begin(self, parts: Sequence[bytes], num_tokens: int) -> None:
        """Takes over the rows of the first ``num_tokens`` tokens, in parts of as many tokens each."""
        data = b"".join(parts)
        self._width = len(data) // num_tokens
        self._data[: len(data)] = data
