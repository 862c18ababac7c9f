"""Experts that the routers of a mixture chose for the tokens of a sequence."""

from __future__ import annotations

from headrace.errors import EngineError


class TokenExperts:
    """Rows of ``RoutedExperts.data``, a token each, from the first token on."""

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

    def begin_with(self, other: TokenExperts, num_tokens: int) -> None:
        """Takes over the rows of tokens that two sequences share."""
        self._data, self._width = bytearray(other.first(num_tokens)), other._width
