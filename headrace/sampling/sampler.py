"""Sampler: from logits to tokens, for the rows of a step that draw one.

The order is that of OpenAI and vLLM: what may come at all (allowed_token_ids, logit_bias, bad_words, min_tokens), then
penalties, then temperature, then min_p, top_k and top_p, then the draw. Nothing between logits and tokens waits for the
device, and a feature that no row uses costs nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.errors import RequestError
from headrace.kernels import gpu
from headrace.outputs import TokenLogprobs
from headrace.sampling.allowed import AllowedTokens
from headrace.sampling.bad_words import BadWords
from headrace.sampling.bias import LogitBias
from headrace.sampling.device import Download
from headrace.sampling.draw import Draw, Drawn
from headrace.sampling.feature import Feature, Indices, Rows
from headrace.sampling.logprobs import Logprobs, Measured, whole_rows
from headrace.sampling.min_tokens import MinTokens
from headrace.sampling.penalties import Penalties
from headrace.sampling.vocabulary import block_maxima
from headrace.text.vocab import TokenBytes

NOT_FINITE = "the model gave logits that are not finite"
NOTHING_ALLOWED = "logit_bias, allowed_token_ids, bad_words and min_tokens leave no token to draw"


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What the rows drew. Index space: row, ``[N]``."""

    tokens: torch.Tensor
    """int64; 0 where ``faults`` is not 0."""
    faults: torch.Tensor
    """int8: 0 for none, 1 if the model's logits are not finite, 2 if no token was left."""
    logprobs: list[tuple[Indices, Measured]]
    """(rows, their logprobs); each row at most once."""

    def download(self, download: Download) -> Sampled:
        logprobs = [(rows, measured.download(download)) for rows, measured in self.logprobs]
        return Sampled(download.copy(self.tokens), download.copy(self.faults), logprobs)

    def errors(self) -> dict[int, str]:
        """row -> why it drew nothing. Read on the host."""
        faults = self.faults.tolist() if bool(self.faults.any()) else []
        return {row: NOT_FINITE if fault == 1 else NOTHING_ALLOWED for row, fault in enumerate(faults) if fault}

    def lists(self) -> dict[int, TokenLogprobs]:
        """row -> its logprobs. Read on the host."""
        return {
            row: entry for rows, measured in self.logprobs for row, entry in zip(rows.tolist(), measured.lists(), strict=True)
        }


class DrawState(NamedTuple):
    """What a draw by kernels takes of the slots, in tensors that stay where they are. Index space: slot."""

    temperatures: torch.Tensor
    """``[S]`` float32; 0 for the best token."""
    keys: torch.Tensor
    """``[S, 3]`` int64, of the random numbers."""
    filters: torch.Tensor
    """``[S, 4]`` float64: temperature as it was asked for, top_k, top_p, min_p."""


class Sampler:
    """State per slot of every feature; ``add`` and ``remove`` follow the life of a slot's sequence."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, token_bytes: TokenBytes | None) -> None:
        self._penalties = Penalties(num_slots, vocab_size, device)
        self._features: tuple[Feature, ...] = (
            AllowedTokens(num_slots, vocab_size, device),
            LogitBias(num_slots, vocab_size, device),
            BadWords(num_slots, vocab_size, device, token_bytes),
            MinTokens(num_slots, vocab_size, device),
            self._penalties,
        )
        self._logprobs = Logprobs(num_slots)
        self._draw = Draw(num_slots, vocab_size, device)
        self._draws_only = np.zeros(num_slots, dtype=np.bool_)
        """Index space: slot. Nothing is asked but a draw."""

    def draws_only(self, slots: Indices) -> bool:
        """True if every slot's sequence draws from the logits as they are, by temperature and filters, and wants no more."""
        return bool(self._draws_only[slots].all())

    def filters(self, slots: Indices) -> bool:
        """True if any slot's sequence draws from what top_k, top_p or min_p keep."""
        return self._draw.filters(slots)

    @property
    def draw_state(self) -> DrawState:
        return DrawState(self._draw.temperatures, self._draw.keys, self._draw.params)

    @property
    def nbytes(self) -> int:
        """Memory of the histograms, the one thing here that grows with the vocabulary."""
        return self._penalties.nbytes

    def add(self, slot: int, seq: NewSequence) -> None:
        """A sequence takes the slot.

        Raises:
            RequestError: what it asks for cannot be done; no feature keeps any of it.
        """
        self._draw.add(slot, seq)
        self._logprobs.add(slot, seq)
        try:
            for feature in self._features:
                feature.add(slot, seq)
        except RequestError:
            self.remove(slot)
            raise
        self._draws_only[slot] = _asks_nothing(seq)

    def remove(self, slot: int) -> None:
        self._draws_only[slot] = False
        for feature in self._features:
            feature.remove(slot)
        self._logprobs.remove(slot)

    def sample(self, logits: torch.Tensor, rows: Rows) -> Sampled:
        """Draws a token for each row and takes note of it. ``logits [N, vocab]`` float32 are used up."""
        # Kernels find their own.
        maxima = None if gpu.takes(logits) else block_maxima(logits)
        given = logits.amax(-1) if maxima is None else maxima.amax(-1)
        wants_raw = self._logprobs.wants_raw(rows)
        raw = whole_rows(wants_raw, logits) if len(wants_raw) else None
        changed = False
        for feature in self._features:
            changed |= feature.apply(logits, rows)
        drawn = self._draw.draw(logits, rows, None if changed else maxima)
        faults = _faults(given, drawn)
        tokens = drawn.tokens.masked_fill(faults > 0, 0)
        logprobs = [] if raw is None else self._logprobs.raw(rows, wants_raw, raw, drawn)
        logprobs += self._logprobs.processed(rows, logits, drawn, self._draw.params[rows.slots_device, 0])
        for feature in self._features:
            feature.update(rows, tokens)
        return Sampled(tokens, faults, logprobs)


def _asks_nothing(seq: NewSequence) -> bool:
    """Of the features and of logprobs."""
    p = seq.sampling
    untouched = p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0
    lists = (p.logit_bias, p.allowed_token_ids, p.bad_words, seq.bad_words)
    return untouched and p.logprobs is None and not p.min_tokens and not any(lists) and p.allowed_token_ids is None


def _faults(given: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """``given``: each row's largest logit as the model gave it."""
    faults = drawn.best.isfinite().logical_not_().to(torch.int8) * 2
    return faults.masked_fill_(given.isfinite().logical_not_(), 1)
