"""Behind its keys and values, the last layer computes the tokens that logits are of, and these as if it computed all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.runner.harness import FAMILIES, Engine, World, model, prompt, request, same

from headrace.attention.backend import StepMetadata
from headrace.models.decoder import Decoder
from headrace.runner.inputs import last_tokens

REQUESTS = [request(f"of {length}", prompt(length, length), max_tokens=3, logprobs=4) for length in (1, 8, 29, 60)]
ASKING = request("asks", prompt(3, 20), max_tokens=2, logprobs=4, prompt_logprobs=2)


def computed(family: str, change: Callable[[Engine], Any] = lambda engine: None) -> tuple[dict, list[int]]:
    """Returns the results of the requests in steps of at most 40 tokens, and how many tokens the last MLP computes in each."""
    counts: list[int] = []
    last = model(family).layers[-1]
    handle = last.mlp.register_forward_pre_hook(lambda module, given: counts.append(len(given[0])))
    engine = Engine(World(family, max_num_batched_tokens=40))
    change(engine)
    engine.add(*REQUESTS)
    try:
        return engine.run(), counts
    finally:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_whole_last_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, counts = computed(family)
    monkeypatch.setattr(Decoder, "selects", lambda *given: False)
    expected, whole = computed(family)
    same(found, expected)
    assert max(whole) > 30
    # Gemma's layers have a form of their own.
    assert (max(counts) <= len(REQUESTS)) == (not family.startswith("gemma"))


def test_prompts_that_ask_for_logprobs_are_computed_whole() -> None:
    _, counts = computed("llama", lambda engine: engine.add(ASKING))
    assert max(counts) >= 20


def test_a_row_breaks_down_with_any_of_its_tokens() -> None:
    """Also with one that no later token sees."""
    starts, lengths = np.array([0, 1, 5, 9]), np.array([3, 4, 9])
    given = torch.from_numpy(starts).int(), torch.from_numpy(lengths).int()
    step = StepMetadata(1, *given, (torch.arange(9),), (torch.zeros(3, 1).int(),), starts, lengths)
    wanted = last_tokens(step, np.array([1, 1, 2]))
    assert wanted is not None and wanted.tokens.tolist() == wanted.step.slot_mapping[0].tolist() == [0, 4, 7, 8]
    assert wanted.rows.tolist() == [0, 1, 2, 2] and wanted.step.query_start.tolist() == [0, 1, 2, 4]
    for token, broken in ((None, []), (2, [1]), (5, [2, 3]), (0, [0])):
        stream = torch.arange(9.0)[:, None].repeat(1, 4)
        if token is not None:
            stream[token, 1] = torch.inf if token == 2 else torch.nan
        found = wanted.of_stream(stream, step.query_start)
        fine = [place for place in range(4) if place not in broken]
        assert found[broken].isnan().all() and found[fine].isfinite().all()
    assert last_tokens(step, np.diff(starts)) is None
