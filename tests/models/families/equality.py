"""What every family is checked for: it says what transformers says, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.models.cases import greedy, prompt
from support.models.harness import Bench, in_company
from transformers import PreTrainedModel

from headrace.models.decoder import Decoder

NEAR = 1e-4
"""Bound of the difference of a logprob in float32."""


def close(ours: torch.Tensor, theirs: torch.Tensor, near: float = NEAR) -> None:
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=near, rtol=0)


def check_greedy(
    theirs: PreTrainedModel, bench: Bench, lengths: Sequence[int], steps: int, near: float = NEAR
) -> list[list[int]]:
    """Checks the greedy tokens and logits of the model of ``bench`` after prompts of these lengths, and returns the tokens."""
    prompts = [prompt(length) for length in lengths]
    tokens, logits = bench.generate(prompts, steps)
    for index, one in enumerate(prompts):
        expected, expected_logits = greedy(theirs, one, steps)
        assert tokens[index] == expected
        close(logits[index], expected_logits, near)
    return tokens


def check_company(ours: Decoder, *, padding: bool = False, near: float = NEAR) -> None:
    """Checks four sequences in one cache against each alone. ``padding``: whether some steps have padding rows."""
    tokens, steps = [prompt(33), prompt(21)], 7
    (one, two), (one_logits, two_logits) = Bench(ours, seed=5).generate(tokens, steps)
    got = in_company(ours, tokens, steps, padding=padding)
    for logits, wanted, wanted_logits in zip(got, (one, two, one), (one_logits, two_logits, one_logits), strict=True):
        assert logits.argmax(-1).tolist() == wanted
        close(logits, wanted_logits, near)
