"""GrammarMatcher: a compiled grammar and its state after the outputs of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.matcher import TOO_COMPLEX, Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

_REPEATED = 64
"""Tokens that repeat each other, or that are digits, after which an output ends: a model does not come back from there."""
_LONGEST_PERIOD = 8
"""Tokens of what repeats itself, at most, where an output that is not JSON ends after ``_REPEATED`` tokens."""
_LOST = 512
"""Tokens that repeat the same few, after which any output ends, complete or not."""
_LONGEST_LOST_PERIOD = 64
_KEPT = 768
"""Last tokens that a matcher keeps: those of ``_LOST``, and more than can be rolled back."""


class GrammarMatcher:
    """Implements ``core.matcher.Matcher`` over llguidance's, which never raises: it falls into an error state for good.

    Tokens of ``end_token_ids`` are allowed exactly where the outputs are complete, whatever their text is.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, end_token_ids: Iterable[int] = (), digits: frozenset[int] | None = None
    ) -> None:
        """``digits``: tokens of digits alone, for JSON, which ends wherever equal tokens or digits follow each other; empty:
        outputs that repeat themselves end where they are complete; None: they do not end so soon. ``_LOST`` tokens end all of
        them."""
        self.vocab_size = vocab_size
        self.known: Mask | None = None
        """llguidance's mask of the state, ``[words(vocab_size)]``, if a copy of this matcher has computed it."""
        self._matcher = matcher
        self._digits = digits
        self._recent: list[int] = []
        """The last tokens, at most ``_KEPT``."""
        self.ends = tuple(sorted({token for token in end_token_ids if 0 <= token < vocab_size}))

    def fill(self, mask: Mask) -> str | None:
        if self.known is None:
            own = np.zeros(words(self.vocab_size), dtype=np.int32)
            refusal = self._guarded("unsafe_compute_mask_ptr", own.ctypes.data, own.nbytes)
            if refusal is not None:
                return refusal
            self.known = own
        finish_masks([self], self.known[None], mask[None])
        return None

    def first_step(self) -> str | None:
        """Advances by the first token that is allowed, and computes the mask behind it.

        Returns:
            Why it cannot; None: it can, or no token is allowed.
        """
        mask = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        if (problem := self.fill(mask)) is not None:
            return problem
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed) or (problem := self.advance([int(allowed[0])])) is not None or self.ended:
            return problem
        return self.fill(mask)

    def advance(self, token_ids: Sequence[int]) -> str | None:
        self.known = None
        self._recent += token_ids
        del self._recent[:-_KEPT]
        return self._guarded("consume_tokens", list(token_ids))

    def rollback(self, count: int) -> None:
        self.known = None
        self._matcher.rollback(count)
        del self._recent[max(0, len(self._recent) - count) :]

    def copy(self) -> GrammarMatcher:
        made = self.with_ends(self.ends, self._digits)
        made._recent = self._recent.copy()
        return made

    def with_ends(self, end_token_ids: Iterable[int], digits: frozenset[int] | None = None) -> GrammarMatcher:
        """A copy for a request with these tokens that end its sequences. ``digits``: as for ``GrammarMatcher``."""
        made = GrammarMatcher(self._matcher.deep_copy(), self.vocab_size, end_token_ids, digits)
        made.known = self.known
        return made

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def stuck(self) -> bool:
        return self._repeats() or self._lost()

    def _repeats(self) -> bool:
        last = self._recent[-_REPEATED:]
        if self._digits is None or len(last) < _REPEATED:
            return False
        if self._digits:
            return last[1:] == last[:-1] or self._digits.issuperset(last)
        return _cyclic(last, _LONGEST_PERIOD) and self.accepting

    def _lost(self) -> bool:
        # Text that no constraint holds is as long as the model likes: it may end anywhere.
        last = self._recent[-_LOST:]
        cyclic = len(last) == _LOST and _cyclic(last, _LONGEST_LOST_PERIOD)
        return cyclic and not (self._digits is None and self.accepting)

    @property
    def accepting(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def inner(self) -> LLMatcher:
        return self._matcher

    @property
    def error(self) -> str | None:
        """Reason why the matcher cannot go on."""
        return reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def _guarded(self, name: str, *arguments: Any) -> str | None:
        try:
            getattr(self._matcher, name)(*arguments)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the library is not an Exception.
            return f"{TOO_COMPLEX}: {error}"
        return self.error


def _cyclic(tokens: list[int], longest: int) -> bool:
    """Whether tokens repeat the same few, ``longest`` at most."""
    ends = (period for period in range(1, longest + 1) if tokens[-1] == tokens[-1 - period])
    return any(tokens[period:] == tokens[:-period] for period in ends)


def words(vocab_size: int) -> int:
    """Returns the 32-bit words of a mask of llguidance's, in which a token behind the vocabulary ends the outputs."""
    return vocab_size // 32 + 1


def finish_masks(matchers: Sequence[GrammarMatcher], own: Mask, masks: Mask) -> None:
    """Converts llguidance's masks ``own`` into those of sequences: with the tokens that end them, without the one behind.

    Args:
        own: ``[N, words(vocab_size)]``.
        masks: ``[N, ceil(vocab_size / 32)]``.
    """
    vocab_size = matchers[0].vocab_size
    masks[:] = own[:, : masks.shape[1]]
    if vocab_size % 32:
        masks[:, -1] &= (1 << vocab_size % 32) - 1
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, matcher in enumerate(matchers):
        rows.setdefault(matcher.ends, []).append(row)
    accepting = np.array([matcher.accepting for matcher in matchers])
    bits = masks.view(np.uint32)
    for ends, picked in rows.items():
        for token in ends:
            bit = np.uint32(1 << token % 32)
            column = bits[picked, token // 32]
            bits[picked, token // 32] = np.where(accepting[picked], column | bit, column & ~bit)


def reason(error: str) -> str:
    """llguidance's error as a client gets it: in one line, and whether a limit was hit."""
    first = " ".join(error.replace("<non-verbose/>", "").partition("<backtrace>")[0].split())[:300] or "unknown error"
    limited = any(word in first for word in ("limit", "too complex", "TooComplex", "fuel", "too large", "too many", "u16::MAX"))
    return f"{TOO_COMPLEX}: {first}" if limited else first
