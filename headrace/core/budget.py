"""StepBudget: the resources that a step can still spend; Waits: which of them held a sequence up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from headrace.core.sequence import Sequence


@dataclasses.dataclass(slots=True)
class StepBudget:
    """Tokens and encoder work that the sequences of a step can still spend."""

    tokens: int
    encoder_tokens: int
    """Encoder work, in the unit of ``Item.encoder_tokens``."""
    reserved: int = 0
    """Part of ``tokens`` kept for decoding sequences later in the order, so that a long prompt ahead does not stall them."""
    prefill: int | None = None
    """Tokens left for prefill, for whose end the next tokens of others wait; None: no limit."""
    prefilled: int = 0
    """Tokens spent on prefill so far."""
    blocks_short: bool = False
    """A running sequence waits for KV blocks: no waiting sequence is admitted."""

    @property
    def spendable(self) -> int:
        """Tokens a prefill chunk may take now: at least one, so that many decoding sequences cannot stall an earlier prompt."""
        return self.room(0)

    def room(self, least: int) -> int:
        """``spendable`` for a chunk of ``least`` tokens or more: the first one of a step may exceed the limit of prefill."""
        free = max(self.tokens - self.reserved, min(self.tokens, 1))
        if self.prefill is None:
            return free
        return min(free, max(self.prefill, least) if self.prefill and not self.prefilled else self.prefill)

    @property
    def for_drafts(self) -> int:
        """Tokens that the drafts of a decoding sequence may take now: those that no decoding sequence needs."""
        return max(0, self.tokens - max(self.reserved, 1))

    def layers(self, tokens: int, left: int, total: int) -> int:
        """Returns how many of the ``left`` layers of a piece of ``tokens`` tokens may be computed now; the model has ``total``.

        As many as ``spendable`` tokens are worth, but at least one in a step without other prefill.
        """
        layers = self.spendable * total // tokens
        if not layers and not self.prefilled and self.spendable:
            layers = 1
        return min(layers, left)

    def spend(self, tokens: int, *, decoding: bool, whole: bool = False) -> None:
        """``whole``: layers of a piece, which may be worth more than ``tokens``; what is reserved is not spent on them."""
        self.tokens -= min(tokens, max(0, self.tokens - self.reserved)) if whole else tokens
        if not decoding:
            self.prefilled += tokens
            if self.prefill is not None:
                self.prefill = max(0, self.prefill - tokens)


class Waits:
    """Keeps where admission stopped last while sequences were left in the queue.

    Sequences are admitted in order, so the reason that stopped the first one stopped all behind it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stopped_at = -math.inf
        self._cause = ""

    def stopped(self, free_slots: int, budget: StepBudget, first: Sequence | None) -> None:
        """Called where the queue is not empty after a step is planned.

        Args:
            first: the sequence that was to be admitted; None: those in the queue were not ready.
        """
        self._stopped_at = self._clock()
        if not free_slots:
            self._cause = "slots"
        elif budget.blocks_short:
            self._cause = "blocks"
        else:
            self._cause = "tokens" if first is not None or budget.spendable <= 0 else "preparation"

    def started(self, seq: Sequence) -> None:
        """Notes the time of a sequence's first step, and the cause if it was in the queue when admission stopped."""
        seq.scheduled_at = self._clock()
        if seq.request.arrival_time <= self._stopped_at:
            seq.waited_for = self._cause
