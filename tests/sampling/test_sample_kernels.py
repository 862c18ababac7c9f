"""The draw as a GPU does it, by kernels, against the draw of the host; and that nothing waits for a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.plan import NewSequence, SamplePlan, pack_tokens
from headrace.kernels import gpu
from headrace.sampling.feature import LogitsRows
from headrace.sampling.logprobs import ALL
from headrace.sampling.masks import HostMasks
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling_params import SamplingParams
from headrace.text.bad_words import compile_bad_words
from headrace.text.vocab import TokenBytes

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")

VOCAB = 700
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 690, "top_p": 0.999},
]


def sampler_of(device: torch.device, kinds: list[dict[str, Any]], vocab: int = VOCAB, **more: Any) -> Sampler:
    """Slot by slot one of the kinds. ``masked``: slots whose sequences are constrained."""
    sampler = Sampler(len(kinds), vocab, device, more.pop("token_bytes", None))
    table, masked = more.pop("table", None), more.pop("masked", [])
    for slot, kind in enumerate(kinds):
        params = SamplingParams(**kind, **more)
        seq = NewSequence(slot, slot, pack_tokens([1, 2, 3]), 2, params, slot, 0, [5], table, constrained=slot in masked)
        sampler.add(slot, seq)
    return sampler


def rows_of(slots: list[int], position: int, device: torch.device) -> LogitsRows:
    index = np.array(slots)
    on_device = torch.from_numpy(index).to(device)
    return LogitsRows(
        index, index * 0 + position, on_device, torch.full((len(slots),), position, device=device), np.arange(len(slots))
    )


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[torch.device]:
    """Device on which the kernels sample; interpreted, they are what a CPU takes, too."""
    if device.type == "cpu":
        monkeypatch.setattr(gpu, "takes", lambda x: True)
    yield device


def sampled(sampler: Sampler, logits: torch.Tensor, slots: list[int], device: torch.device) -> Sampled:
    return sampler.sample(logits[slots].to(device), rows_of(slots, 3, device))


@pytest.mark.parametrize("slots", [list(range(len(KINDS))), [0], [0, 1], [3, 0], [6, 2]], ids=str)
def test_tokens_and_logprobs_are_those_of_the_host(
    slots: list[int], by_kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processed logprobs tell what every row's filters kept."""
    logits = 2 * torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(1))
    more: dict[str, Any] = {"logprobs": ALL, "logprobs_mode": "processed"}
    found = sampled(sampler_of(by_kernels, KINDS, **more), logits, slots, by_kernels)
    tokens, lists = found.tokens.cpu(), found.lists()
    monkeypatch.undo()
    cpu = torch.device("cpu")
    expected = sampled(sampler_of(cpu, KINDS, **more), logits, slots, cpu)
    assert tokens.tolist() == expected.tokens.tolist()
    for row, entry in expected.lists().items():
        assert lists[row].token_ids == entry.token_ids
        np.testing.assert_allclose(lists[row].logprobs, entry.logprobs, atol=1e-5)


def test_faults(by_kernels: torch.device) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 3], logits[1] = torch.nan, torch.inf
    sampler = sampler_of(by_kernels, KINDS[2:6])
    only = sampler_of(by_kernels, [{"top_p": 0.5, "min_tokens": 3, "allowed_token_ids": [5]}])
    found = sampler.sample(logits.to(by_kernels), rows_of([0, 1, 2, 3], 3, by_kernels))
    assert found.faults.tolist() == [1, 1, 0, 0] and found.tokens.tolist()[:2] == [0, 0]
    assert only.sample(logits[3:].to(by_kernels), rows_of([0], 0, by_kernels)).faults.tolist() == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[:2], KINDS[2:3]], ids=["all", "greedy", "plain", "filtered"])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("masks", [False, True])
def test_nothing_waits_for_the_device(kinds: list[dict[str, Any]], features: bool, masks: bool) -> None:
    """Every second row has a mask, which the step uploads."""
    device, vocab = torch.device("cuda"), 20_000
    more: dict[str, Any] = {}
    if features:
        pieces = [b" t%d" % token for token in range(vocab)]
        token_bytes = TokenBytes(pieces, frozenset())
        more = {"logit_bias": {7: 1.0}, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 9}
        more |= {"bad_words": ["t77", "t12 t5"], "logprobs": 4, "logprobs_mode": "processed", "token_bytes": token_bytes}
        more["table"] = compile_bad_words(more["bad_words"], token_bytes, special_text=False)
    masked = list(range(0, len(kinds), 2)) if masks else []
    plan = masked_plan(masked, vocab)
    sampler = sampler_of(device, kinds, vocab, masked=masked, **more)
    logits = torch.randn(len(kinds), vocab, device=device)
    rows = rows_of(list(range(len(kinds))), 3, device)
    graph_inputs = torch.zeros(len(kinds) + 1 + len(plan.masks) // 4, dtype=torch.int32, device=device)

    def step() -> Sampled:
        sent = HostMasks.of(plan, rows.slots, vocab)
        if sent is not None:
            sent.copy_to(graph_inputs, len(kinds) + 1)
        return sampler.sample(logits.clone(), rows, None if sent is None else sent.upload(device))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
        sampler_of(device, kinds, vocab)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not found.errors()
    tokens = found.tokens.tolist()
    assert all(tokens[row] % 64 < 32 for row in masked)
    assert graph_inputs[: len(kinds) + 1].tolist() == [
        row // 2 if row in masked else -1 if masked else 0 for row in range(len(kinds) + 1)
    ]


def masked_plan(slots: list[int], vocab: int) -> SamplePlan:
    """Masks that allow every second word of the vocabulary."""
    words = np.zeros((len(slots), -(-vocab // 32)), dtype="<i4")
    words[:, ::2] = -1
    return SamplePlan(0, slots, memoryview(words.tobytes()))
