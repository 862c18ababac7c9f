"""StepBudget: the resources that a step can still spend."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class StepBudget:
    """Tokens and encoder work that the sequences of a step can still spend."""

    tokens: int
    encoder_tokens: int
    """Encoder work, in the unit of ``Item.encoder_tokens``."""
    reserved: int = 0
    """Part of ``tokens`` kept for decoding sequences later in the order, so that a long prompt ahead does not stall them."""
    prefill: int | None = None
    """Tokens left for prefill while sequences decode, whose next tokens wait for the end of the step; None: no limit."""
    blocks_short: bool = False
    """A running sequence waits for KV blocks: no waiting sequence is admitted."""

    @property
    def spendable(self) -> int:
        """Tokens a prefill chunk may take now: at least one, so that many decoding sequences cannot stall an earlier prompt."""
        free = max(self.tokens - self.reserved, min(self.tokens, 1))
        return free if self.prefill is None else min(free, self.prefill)

    def spend(self, tokens: int, *, decoding: bool) -> None:
        self.tokens -= tokens
        if self.prefill is not None and not decoding:
            self.prefill = max(0, self.prefill - tokens)
