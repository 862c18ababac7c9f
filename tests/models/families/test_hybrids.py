"""Hybrid families say what transformers says, token for token, however their prompts are cut and whatever runs beside them."""

from __future__ import annotations

import pytest
import torch
from support.models.cases import greedy, prompt
from support.models.harness import Bench, in_company
from support.models.hybrids import CASES, pair

from headrace.models import registry

STEPS = 12
LENGTHS = (1, 30, 70)
COMMON = (
    *("qwen3.5-tied", "qwen3-next", "lfm2", "lfm2-adjusted", "bamba", "granite-dense", "falcon-h1-norm", "nemotron-h-biases"),
    *("nemotron-h", "nemotron-h-experts", "olmo-hybrid-even", "qwen3.5-pictures", "qwen3.5-moe-pictures"),
)
"""What other cases here have too."""
MIXED = ("qwen3.5-moe", "lfm2-moe", "falcon-h1", "nemotron-h-latent")
"""The kinds of states, and of layers."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in COMMON else name for name in CASES]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers(name: str) -> None:
    theirs, ours = pair(name)
    prompts = [prompt(length) for length in LENGTHS]
    tokens, logits = Bench(ours, num_blocks=160).generate(prompts, STEPS)
    for index, one in enumerate(prompts):
        expected, expected_logits = greedy(theirs, one, STEPS)
        assert tokens[index] == expected
        close(logits[index], expected_logits)
    assert len({token for sequence in tokens for token in sequence}) > STEPS


@pytest.mark.parametrize("name", [name if name in MIXED else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_chunks_copies_preemption_and_company_change_nothing(name: str) -> None:
    """Four sequences in one cache: in chunks beside others, from another's state, and taken away and resumed."""
    _, ours = pair(name)
    tokens = [prompt(33), prompt(21)]
    steps = 7
    (one, two), (one_logits, two_logits) = Bench(ours, seed=5).generate(tokens, steps)
    got = in_company(ours, tokens, steps, padding=True)
    for logits, wanted, wanted_logits in zip(got, (one, two, one), (one_logits, two_logits, one_logits), strict=True):
        assert logits.argmax(-1).tolist() == wanted
        close(logits, wanted_logits)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_model_holds_lies_on_its_device(name: str) -> None:
    theirs, _ = pair(name)
    model = registry.build(registry.model_spec(theirs.config), "float32", "meta")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [where for where, tensor in held.items() if not tensor.is_meta] == []
