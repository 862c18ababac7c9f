"""Every family says what transformers says, token for token, through a paged cache with shuffled blocks."""

from __future__ import annotations

import pytest
import torch
from support.models.cases import CASES, SMALL, VOCAB, pair, prompt
from support.models.harness import Bench, Seq, random_model

from headrace.attention import select
from headrace.models import registry

from .equality import check_company, check_greedy, close

STEPS = 26
LENGTHS = (1, 30)
slow = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(name: str) -> None:
    theirs, ours = pair(name)
    check_greedy(theirs, Bench(ours), LENGTHS, STEPS)


PLAINER = ("gemma4-shared", "llama-tied", "mistral-window", "qwen2-mixed", "gemma3", "deepseek-v2")
"""MLA and windows are interpreted by ``test_launches`` too, shared KV by ``test_geometry``."""


@pytest.mark.parametrize("name", ["qwen3-uneven-wide-v", *(pytest.param(name, marks=slow) for name in PLAINER)])
def test_every_backend_says_the_same(name: str) -> None:
    _, ours = pair(name)
    prompts = [prompt(length) for length in (1, 17)]
    expected = Bench(ours, "reference").generate(prompts, 3)
    for seed, (backend, reasons) in enumerate(select.refusals(ours.spec.layers[0], "cpu", "float32").items()):
        if reasons or backend == "reference":
            continue
        tokens, logits = Bench(ours, backend, seed=seed).generate(prompts, 3)
        assert tokens == expected[0]
        for a, b in zip(logits, expected[1], strict=True):
            close(a, b)


AS_OTHERS = ("llama-tied", "llama-biases", "llama-gelu", "llama-linear", "llama-llama3", "llama-yarn", "mistral", "qwen2")
"""Families that attend as others here do."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) if name in AS_OTHERS else name for name in CASES])
def test_chunks_hits_preemption_and_company_change_nothing(name: str) -> None:
    """Four sequences in one cache: in chunks beside others, from another's blocks, and taken away and resumed."""
    _, ours = pair(name)
    check_company(ours)


@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=slow), 5, pytest.param(16, marks=slow), 31])
@pytest.mark.parametrize(
    "name",
    [
        *("llama-dynamic", "llama4", "qwen2-mixed", "qwen3", "llama-uneven-narrow-v", "gemma3", "gemma4-shared"),
        *("ernie-moe", "deepseek-v2"),
    ],
)
def test_chunked_prefill_equals_one_shot(name: str, chunk: int) -> None:
    _, ours = pair(name)
    tokens = prompt(43)
    whole = Bench(ours)
    parts = Bench(ours, seed=7, block_size=5)
    close(parts.prefill(parts.sequence(tokens), chunk), whole.prefill(whole.sequence(tokens)))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-windows", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow), 2])
def test_mixed_batches_equal_separate_runs(name: str, seed: int) -> None:
    """Decodes, first chunks, later chunks and one-token chunks in one step, in any order, with padding."""
    _, ours = pair(name)
    together, alone = Bench(ours), Bench(ours, seed=seed + 1)
    # (tokens computed before, tokens in the mixed step)
    kinds = [(12, 1), (0, 9), (17, 6), (3, 1), (0, 1), (25, 1), (8, 20)]
    sequences: list[tuple[Seq, int]] = []
    expected = []
    for index, (before, count) in enumerate(kinds):
        tokens = prompt(before + count, seed=index + 1)
        single = alone.sequence(tokens)
        if before:
            alone.step([(single, before)])
        expected.append(alone.step([(single, count)]))
        mixed = together.sequence(tokens)
        if before:
            together.step([(mixed, before)])
        sequences.append((mixed, count))
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed)).tolist()
    out = together.step([sequences[index] for index in order], wide=seed, padding=seed)
    close(out, torch.cat([expected[index] for index in order]))


def test_a_long_prompt_in_pieces_with_a_window() -> None:
    """More queries than one mask holds, behind a prefix."""
    _, ours = pair("qwen2-mixed")
    tokens = prompt(700)
    whole, parts = Bench(ours, num_blocks=200), Bench(ours, num_blocks=200, seed=3)
    close(parts.prefill(parts.sequence(tokens), 333), whole.prefill(whole.sequence(tokens)))


@pytest.mark.parametrize("name", CASES)
def test_all_that_a_model_holds_lies_on_its_device(name: str) -> None:
    _, config_class, changes = CASES[name]
    model = registry.build(registry.model_spec(config_class(**{**SMALL, **changes})), "float32", "meta")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held |= {
        f"{path}.{attribute}": value
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    assert [where for where, tensor in held.items() if not tensor.is_meta] == []


def test_bfloat16_stays_near() -> None:
    _, ours = pair("llama")
    half = random_model(ours.spec, "bfloat16")
    for mine, exact in zip(half.parameters(), ours.parameters(), strict=True):
        mine.data.copy_(exact)
    tokens = prompt(40)
    a, b = Bench(half), Bench(ours)
    got, expected = a.prefill(a.sequence(tokens)), b.prefill(b.sequence(tokens))
    assert got.dtype == torch.float32
    error = (got.log_softmax(-1) - expected.log_softmax(-1)).abs()
    assert error.quantile(0.99) < 0.25


def test_no_tokens_at_all() -> None:
    _, ours = pair("llama")
    assert Bench(ours).step([]).shape == (0, VOCAB)
    assert ours.logits(torch.empty(0, ours.spec.hidden_size)).shape == (0, VOCAB)
