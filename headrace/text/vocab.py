"""TokenBytes: the text of every token, as bytes. The text of tokens is the UTF-8 decoding of their bytes in a row."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_ANSWER_TOKENS = 64
"""Tokens at the end of a prompt within which the answer's turn begins."""
SEPARATOR = 0xFF
"""Parts tokens in a ``VocabularyIndex``'s blob. UTF-8 text never holds this byte, so no match crosses a border."""


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token id adds to the text, ``[vocab_size]``; ids that the tokenizer lacks add none."""

    pieces: Sequence[bytes]
    special: frozenset[int]
    """Tokens that ``skip_special_tokens`` leaves out of the text."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenBytes, (self.pieces, self.special)  # without the indexes, which are larger and quickly made

    def prepare(self) -> None:
        """Makes what is else made when it is first asked for, in a request's time."""
        _ = self.visible, self.visible_index

    @functools.cached_property
    def visible(self) -> list[bytes]:
        """``pieces`` as ``skip_special_tokens`` shows them: nothing for special tokens."""
        visible = list(self.pieces)
        for token in self.special:
            if token < len(visible):
                visible[token] = b""
        return visible

    @functools.cached_property
    def index(self) -> VocabularyIndex:
        """Over ``pieces``."""
        return VocabularyIndex(self.pieces)

    @functools.cached_property
    def visible_index(self) -> VocabularyIndex:
        """Over ``visible``."""
        return VocabularyIndex(self.visible)

    def turn_boundaries(self, token_ids: list[int]) -> tuple[int, ...]:
        """Returns the numbers of tokens of a rendered conversation before its second turn and before that of the answer.

        Others share the first turn where it has instructions or tools; and templates may write the answer's turn in another way
        when the next prompt repeats it. A turn begins with the last special token that is not the first of its kind. Prompts
        without such turns have no boundaries.
        """
        for answer in range(len(token_ids) - 1, max(-1, len(token_ids) - 1 - _ANSWER_TOKENS), -1):
            mark = token_ids[answer]
            if mark in self.special and (first := token_ids.index(mark)) < answer:
                return tuple(sorted({token_ids.index(mark, first + 1), answer}))
        return ()


class VocabularyIndex:
    """Finds tokens by how their text begins, and by what it contains."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self.tokens: npt.NDArray[np.int64] = np.array(order, dtype=np.int64)
        """``[vocab_size]``: token ids by their bytes, ascending."""
        self._sorted = [pieces[token] for token in order]
        separator = bytes([SEPARATOR])
        self._blob = np.frombuffer(separator.join(pieces) + separator, dtype=np.uint8)
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        self._starts = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]) if len(pieces) else lengths
        self.num_with_text = int(np.count_nonzero(lengths))

    def starting_with(self, prefix: bytes) -> tuple[int, int]:
        """The range ``[low, high)`` of ``tokens`` whose text begins with ``prefix``: UTF-8 of whole characters, or its tail."""
        after = prefix[:-1] + bytes([prefix[-1] + 1])
        low = bisect_left(self._sorted, prefix)
        return low, bisect_left(self._sorted, after, low)

    def containing(self, word: bytes) -> npt.NDArray[np.int64]:
        """Ids of the tokens whose text contains ``word`` (UTF-8, not empty); ascending."""
        places = np.flatnonzero(self._blob == word[0])
        for offset, byte in enumerate(word[1:], start=1):
            places = places[self._blob[places + offset] == byte]
        return np.unique(np.searchsorted(self._starts, places, side="right") - 1)
