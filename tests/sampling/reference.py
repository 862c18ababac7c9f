"""Plainest possible sampling: one row, float64, a loop or a sort wherever that is clearest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from support.bad_words_reference import BadWordsStepper

from headrace.core.plan import NewSequence, pack_tokens
from headrace.sampling.feature import LogitsRows
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling_params import SamplingParams
from headrace.text.bad_words import compile_bad_words
from headrace.text.vocab import TokenBytes

CPU = torch.device("cpu")


def processed_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    outputs: Sequence[int],
    eos: Sequence[int] = (),
    token_bytes: TokenBytes | None = None,
) -> torch.Tensor:
    """Up to and with the penalties, ``[vocab]`` float64."""
    row = logits.double().clone()
    if params.allowed_token_ids is not None:
        for token in range(len(row)):
            if token not in params.allowed_token_ids:
                row[token] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if params.bad_words and token_bytes is not None:
        special_text = not params.skip_special_tokens
        stepper = BadWordsStepper(compile_bad_words(params.bad_words, token_bytes, special_text=special_text), token_bytes)
        for token in outputs:
            if token < len(token_bytes.pieces):
                stepper.push(token)
        for token in stepper.banned():
            row[token] = -torch.inf
    if len(outputs) < params.min_tokens:
        for token in [*eos, *(params.stop_token_ids or [])]:
            row[token] = -torch.inf
    for token in {*prompt, *outputs}:
        row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
    for token in set(outputs):
        row[token] -= params.presence_penalty + params.frequency_penalty * list(outputs).count(token)
    return row


def probabilities(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns the distribution that is sampled, ``[vocab]`` float64. Temperature 0: all on the best token, of equals the
    first."""
    if params.temperature == 0.0:
        return torch.nn.functional.one_hot(row.argmax(), len(row)).double()
    shares = (row / params.temperature).softmax(-1)
    kept = shares >= params.min_p * shares.max()
    if params.top_k > 0:
        ahead = torch.tensor([int((row > value).sum()) for value in row])
        kept &= ahead < params.top_k
    shares = torch.where(kept, shares, 0.0)
    shares = shares / shares.sum()
    if params.top_p < 1.0:
        ahead = torch.stack([shares[row > value].sum() for value in row])
        shares = torch.where(ahead < params.top_p, shares, 0.0)
    return shares / shares.sum()


def sequence(
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    *,
    slot: int = 0,
    seed: int = 0,
    eos: Sequence[int] = (),
    token_bytes: TokenBytes | None = None,
) -> NewSequence:
    table = None
    if params.bad_words and token_bytes is not None:
        table = compile_bad_words(params.bad_words, token_bytes, special_text=not params.skip_special_tokens)
    return NewSequence(slot, slot, pack_tokens([*prompt, *outputs]), len(prompt), params, seed, 0, list(eos), table)


class Bench:
    """A sampler, and what its slots have drawn so far."""

    def __init__(self, vocab_size: int, token_bytes: TokenBytes | None = None, slots: int = 8) -> None:
        self.sampler = Sampler(slots, vocab_size, CPU, token_bytes)
        self._lengths: dict[int, tuple[int, int]] = {}
        """slot -> tokens, outputs"""

    def add(self, seq: NewSequence) -> None:
        self._lengths[seq.slot] = len(seq.token_ids), len(seq.token_ids) - seq.prompt_len
        self.sampler.add(seq.slot, seq)

    def remove(self, slot: int) -> None:
        del self._lengths[slot]
        self.sampler.remove(slot)

    def step(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        """``logits [len(slots), vocab]`` stay as they are."""
        index = torch.tensor(slots)
        lengths = torch.tensor([self._lengths[slot] for slot in slots])
        rows = LogitsRows(index.numpy(), lengths[:, 1].numpy(), index, lengths[:, 0], np.arange(len(slots)))
        sampled = self.sampler.sample(logits.clone(), rows)
        for slot in slots:
            total, outputs = self._lengths[slot]
            self._lengths[slot] = total + 1, outputs + 1
        return sampled
