"""PrefillPace: how many tokens of prompts a step may have, so that it does not take too long."""

from __future__ import annotations

FIRST_TOKENS = 64
"""Tokens of the first step that is to take a certain time: nothing is known of the machine yet."""
LEAST_TOKENS = 16
"""Least tokens of a step: fewer hardly make it shorter, since it reads all weights in any case."""
GROWTH = 4
"""Largest ratio of a step's tokens to those of a step that was measured: what has not been tried may be slower."""


class PrefillPace:
    """Two limits: one of tokens in steps with decoding sequences, and one of the seconds that any step takes.

    The second follows the measured speed, by the time that the results of steps with prefill report, and has no other clock.
    A step that took too long lowers ``tokens`` to what would have taken ``seconds``. A shorter one may raise it, and never
    lowers it, since the time of small steps is mostly not that of their tokens.
    """

    def __init__(self, beside_decode: int | None, seconds: float | None) -> None:
        """None: no limit."""
        self._beside_decode = beside_decode
        self._seconds = seconds
        self._debt = 0
        """Tokens of past steps above ``beside_decode``: the next steps' limits pay for them."""
        self.tokens = FIRST_TOKENS
        """Tokens of a step that takes no longer than ``seconds``, as far as is known."""

    def limit(self, num_decoding: int) -> int | None:
        """Returns the most tokens of prompts in a step that also has a token of ``num_decoding`` other sequences; None: no
        limit."""
        limits = []
        if self._seconds is not None:
            limits.append(max(LEAST_TOKENS, self.tokens - num_decoding))
        if self._beside_decode is not None and num_decoding:
            limits.append(max(0, self._beside_decode - self._debt))
        return min(limits, default=None)

    def launched(self, num_decoding: int, prefilled: int) -> None:
        """Counts a step with ``prefilled`` tokens of prompts: atomic items may exceed the limit."""
        if self._beside_decode is not None:
            self._debt = max(0, self._debt + prefilled - self._beside_decode) if num_decoding else 0

    def measured(self, tokens: int, seconds: float) -> None:
        """Learns from a step with prefill that had ``tokens`` tokens and took ``seconds``."""
        if self._seconds is None or seconds <= 0.0:
            return
        fitting = tokens * self._seconds / seconds
        if seconds > self._seconds:
            self.tokens = max(LEAST_TOKENS, min(self.tokens, int(fitting)))
        else:
            self.tokens = max(self.tokens, int(min(fitting, GROWTH * tokens)))
