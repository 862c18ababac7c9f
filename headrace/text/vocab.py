"""TokenBytes: the text of every token, as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """What each token id adds to the text. Index space: token id, ``[vocab_size]`` (ids the tokenizer lacks are empty)."""

    pieces: Sequence[bytes]
    special: frozenset[int]
    """Tokens that ``skip_special_tokens`` leaves out of the text."""
