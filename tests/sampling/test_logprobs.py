"""Logprobs against the plain definition."""

from __future__ import annotations

import pytest
import torch

from headrace.sampling.logprobs import ALL, measure, measure_in_slices
from headrace.sampling_params import SamplingParams

from .reference import Bench, sequence


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [40, 20_000])
@pytest.mark.parametrize("count", [0, 1, 5, ALL])
def test_measured_is_the_definition(vocab: int, count: int) -> None:
    logits = logits_of(4, vocab)
    tokens = torch.tensor([3, 0, 39, int(logits[3].argmax())])
    for entry, row, token in zip(measure(logits, tokens, count).lists(), logits.double(), tokens.tolist(), strict=True):
        logprobs = row.log_softmax(-1)
        ranked = sorted(range(vocab), key=lambda t, row=row: (-row[t].item(), t))[: vocab if count == ALL else count]
        assert entry.token_ids == [token, *ranked]
        assert entry.logprobs == pytest.approx(logprobs[entry.token_ids].tolist(), abs=1e-5)
        assert entry.rank == int((row > row[token]).sum()) + 1


def test_equals_have_one_rank_and_come_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0]])
    (entry,) = measure(logits, torch.tensor([2]), 3).lists()
    assert entry.token_ids == [2, 1, 3, 0] and entry.rank == 3


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    (entry,) = measure(logits_of(1, 6), torch.tensor([2]), 50).lists()
    assert len(entry.token_ids) == 7


def test_tokens_without_probability_are_left_out() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    (entry,) = measure(logits, torch.tensor([2]), 4).lists()
    assert entry.token_ids == [2, 2, 0]


def test_slices_are_the_whole_and_stay_small() -> None:
    hidden = logits_of(11, 8)
    weight = logits_of(8, 300, 1)
    tokens = torch.arange(11)
    seen: list[int] = []

    def project(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part @ weight

    parts = measure_in_slices(project, hidden, tokens, 2, 4)
    assert seen == [4, 4, 3]
    whole = measure(hidden @ weight, tokens, 2).lists()
    found = [entry for part in parts for entry in part.lists()]
    assert [entry.token_ids for entry in found] == [entry.token_ids for entry in whole]


def test_raw_is_of_the_untouched_logits_whatever_is_done_to_them() -> None:
    logits = logits_of(3, 500)
    changes = {"logit_bias": {7: 50.0}, "repetition_penalty": 2.0, "allowed_token_ids": [7, 8], "top_k": 2}
    bench = Bench(500)
    for slot in range(3):
        bench.add(sequence(SamplingParams(**changes, logprobs=slot + 1), [7], slot=slot))
    entries = bench.step(logits, [0, 1, 2]).lists()
    for row in range(3):
        assert entries[row].token_ids[0] in (7, 8)
        (expected,) = measure(logits[row : row + 1], torch.tensor(entries[row].token_ids[:1]), row + 1).lists()
        assert entries[row] == expected


def test_modes_and_counts_mix_in_one_batch() -> None:
    logits = logits_of(4, 500)
    kinds = [{"logprobs": 3}, {}, {"logprobs": 0, "logprobs_mode": "processed"}, {"logprobs": 3, "logprobs_mode": "processed"}]
    bench = Bench(500)
    for slot, kind in enumerate(kinds):
        bench.add(sequence(SamplingParams(temperature=0.5, top_k=2, **kind), slot=slot))
    entries = bench.step(logits, [0, 1, 2, 3]).lists()
    assert {row: len(entry.token_ids) for row, entry in entries.items()} == {0: 4, 2: 1, 3: 3}
    best = logits[3].double().topk(2)
    expected = (best.values / 0.5).log_softmax(-1)
    assert entries[3].token_ids[1:] == best.indices.tolist()
    assert entries[3].logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_slot_that_asks_for_none_gets_none_after_one_that_did() -> None:
    bench = Bench(50)
    bench.add(sequence(SamplingParams(logprobs=3)))
    assert bench.step(logits_of(1, 50), [0]).lists()
    bench.remove(0)
    bench.add(sequence(SamplingParams()))
    assert not bench.step(logits_of(1, 50), [0]).lists()
