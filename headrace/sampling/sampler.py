"""Sampler: samples a token for each logits row of a step.

A row with drafts has a logits row for its next token and one behind each draft, whose token is sampled as if the drafts before
it had been sampled. Those that were not end the row: the tokens behind them are not kept.

The order is that of OpenAI and vLLM: bans and biases (token masks, allowed_token_ids, logit_bias, bad_words, min_tokens),
then penalties, temperature, min_p, top_k and top_p, and finally the random choice. Nothing between logits and tokens waits
for the device, and a feature that no row uses costs nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence
from headrace.kernels import gpu
from headrace.kernels.transfer import upload
from headrace.outputs import Failure, TokenLogprobs
from headrace.sampling.allowed import AllowedTokens
from headrace.sampling.bad_words import BadWords
from headrace.sampling.bias import LogitBias
from headrace.sampling.feature import Feature, Indices, LogitsRows
from headrace.sampling.logprobs import Logprobs, Measured, SampledRows
from headrace.sampling.masks import Constrained, TokenMasks
from headrace.sampling.min_tokens import MinTokens
from headrace.sampling.penalties import Penalties
from headrace.sampling.topk_topp import SampledTokens, TopKTopPSampler
from headrace.sampling.vocabulary import block_maxima
from headrace.text.vocab import TokenBytes

NOT_FINITE = Failure("the model computed logits that are not finite")
NOTHING_ALLOWED = Failure(
    "structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token to sample", client=True
)

FAULTS = {1: NOT_FINITE, 2: NOTHING_ALLOWED}


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Sampled tokens of a step. Index space: logits row, ``[N]``."""

    tokens: torch.Tensor
    """int64; 0 where ``faults`` is not 0."""
    faults: torch.Tensor
    """int8: 0 for none, 1 if the model's logits are not finite, 2 if every token is banned."""
    logprobs: list[tuple[Indices, Measured]]
    """(logits rows, their logprobs); each logits row appears at most once."""
    counts: torch.Tensor | None = None
    """``[rows with logits]`` int64: number of each row's tokens that are kept, from the first; None: all."""

    def errors(self) -> dict[int, Failure]:
        """logits row -> why no token was sampled. Call on a host copy."""
        return {row: FAULTS[fault] for row, fault in enumerate(self.faults.tolist()) if fault}

    def lists(self) -> dict[int, TokenLogprobs]:
        """logits row -> its logprobs. Call on a host copy."""
        return {
            row: entry for rows, measured in self.logprobs for row, entry in zip(rows.tolist(), measured.lists(), strict=True)
        }


class SamplingState(NamedTuple):
    """Per-slot inputs of the sampling kernels, at fixed addresses. Index space: slot."""

    temperatures: torch.Tensor
    """``[S]`` float32; 0 takes the best token."""
    keys: torch.Tensor
    """``[S, 3]`` int64: keys of the random numbers."""
    filters: torch.Tensor
    """``[S, 4]`` float64: requested temperature, top_k, top_p, min_p."""


class Sampler:
    """Holds the per-slot state of all sampling features."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, token_bytes: TokenBytes | None) -> None:
        self._penalties = Penalties(num_slots, vocab_size, device)
        self._logprobs = Logprobs(num_slots)
        self._constrained = Constrained(num_slots)
        self._features: tuple[Feature, ...] = (
            self._constrained,
            self._logprobs,
            AllowedTokens(num_slots, vocab_size, device),
            LogitBias(num_slots, vocab_size, device),
            BadWords(num_slots, vocab_size, device, token_bytes),
            MinTokens(num_slots, vocab_size, device),
            self._penalties,
        )
        self._topk_topp = TopKTopPSampler(num_slots, vocab_size, device)
        self._num_features = np.zeros(num_slots, dtype=np.int64)
        """slot -> number of features that apply to its sequence."""

    def plain(self, slots: Indices, masked: npt.NDArray[np.bool_] | None = None) -> bool:
        """True if no feature applies to any of the slots: sampling uses the model's logits unchanged.

        Args:
            masked: ``[N]`` bool: the slots whose logits have token masks; constraints need nothing else.
        """
        features = self._num_features[slots]
        return not (features if masked is None else features - (self._constrained.holds(slots) & masked)).any()

    def filters(self, slots: Indices) -> bool:
        """True if top_k, top_p or min_p restrict any of the slots."""
        return self._topk_topp.filters(slots)

    @property
    def sampling_state(self) -> SamplingState:
        return SamplingState(self._topk_topp.temperatures, self._topk_topp.keys, self._topk_topp.params)

    @property
    def nbytes(self) -> int:
        """Bytes of the penalties' histograms, the only large state that grows with slots times vocabulary."""
        return self._penalties.nbytes

    def add(self, slot: int, seq: NewSequence) -> None:
        """Initialises a slot for its new sequence, whose ``sampling_state`` ``send`` brings up to date.

        After an exception no feature applies to the slot, and steps may still have rows of it.
        """
        try:
            self._topk_topp.add(slot, seq)
            self._num_features[slot] = sum([feature.add(slot, seq) for feature in self._features])
        except Exception:
            self.remove(slot)
            raise

    def send(self) -> None:
        """Launches the transfer of what was added to ``sampling_state``, which replays of a captured sampler read."""
        self._topk_topp.send()

    def remove(self, slot: int) -> None:
        """Clears a slot, whatever of ``add`` has been done."""
        self._num_features[slot] = 0
        self._topk_topp.remove(slot)
        for feature in self._features:
            feature.remove(slot)

    def sample(self, logits: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None = None) -> Sampled:
        """Samples a token for each logits row and updates the features. Overwrites ``logits [N, vocab]`` float32."""
        self._constrained.check(rows, masks)
        # The sampling kernels do not need block maxima.
        maxima = None if gpu.takes(logits) else block_maxima(logits)
        model_best = logits.amax(-1) if maxima is None else maxima.amax(-1)
        wants_raw = self._logprobs.wants_raw(rows)
        raw = logits.index_select(0, upload(wants_raw, logits.device)) if len(wants_raw) else None
        changed = masks is not None
        if masks is not None:
            masks.apply(logits)
        users = [(feature, picked) for feature in self._features if len(picked := feature.users(rows))]
        for feature, picked in users:
            changed |= feature.apply(logits, rows, picked)
        sampled = self._topk_topp.sample(logits, rows, None if changed else maxima)
        faults = _faults(model_best, sampled)
        tokens = sampled.tokens.masked_fill(faults > 0, 0)
        done = SampledRows(logits, sampled, self._topk_topp.temperatures[rows.slots_device])
        logprobs = [] if raw is None else self._logprobs.raw(rows, wants_raw, raw, done)
        logprobs += self._logprobs.processed(rows, done)
        kept = rows.kept(tokens)
        for feature, picked in users:
            feature.update(rows, picked, tokens, kept)
        return Sampled(tokens, faults, logprobs, None if kept is None else _counts(rows, kept))


def _counts(rows: LogitsRows, kept: torch.Tensor) -> torch.Tensor:
    """``Sampled.counts``."""
    _, owner = np.unique(rows.row, return_inverse=True)
    counts = torch.zeros(int(owner[-1]) + 1, dtype=torch.int64, device=kept.device)
    return counts.index_add_(0, upload(owner, kept.device), kept.long())


def _faults(model_best: torch.Tensor, sampled: SampledTokens) -> torch.Tensor:
    """``Sampled.faults``. ``model_best``: the largest logit of each row as the model computed it."""
    faults = sampled.best.isfinite().logical_not_().to(torch.int8) * 2
    return faults.masked_fill_(model_best.isfinite().logical_not_(), 1)
