"""Engines whose attention is FlashInfer's in every step, beside the default: the same text, up to bfloat16's rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runner.graphs import StepGraphs

from .conftest import CUDA
from .driver import driving
from .test_invariants import PLAIN, REQUESTS, WAYS, arguments, close, expected, graphs_ran, null_blocks_are_untouched, together
from .tiny import EVERY_EXPERT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
FAMILIES = ("llama", "qwen3", "windows", EVERY_EXPERT, "latent, full width")
ASKED = {"attention_backend": "flashinfer", "wait_for_kernels": True}


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(900)
def test_as_the_default(family: str, way: str, device: str, folder_of: Callable[[str], Path]) -> None:
    """Logprobs of the same tokens after the same tokens, prompts' and outputs'."""
    wanted = expected(folder_of(family), device, "bfloat16")
    with driving(arguments(folder_of(family), device, "bfloat16", **WAYS[way].args | ASKED)) as driver:
        assert {layer.backend for layer in driver.info.layers} == {"flashinfer"}
        close(WAYS[way].serve(driver, REQUESTS), wanted)
        null_blocks_are_untouched(driver)
        graphs_ran(driver, device, way)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(900)
def test_greedy_tokens_are_the_defaults(family: str, device: str, folder_of: Callable[[str], Path]) -> None:
    """Most of them: where two tokens are as good as equally likely, rounding decides, and what follows is another text."""
    wanted = expected(folder_of(family), device, "bfloat16")
    greedy = [each for each in PLAIN if each.sampling.greedy]
    with driving(arguments(folder_of(family), device, "bfloat16", **ASKED)) as driver:
        found = together(driver, greedy)
        graphs = driver.runner._graphs
        assert isinstance(graphs, StepGraphs) and graphs._replanned, "the graphs are not FlashInfer's"
        assert all(backend.graph_version == 0 for backend in graphs._replanned), (
            "a graph was captured before its kernel was there"
        )
    pairs = [(found[each.request_id][0].token_ids, wanted[each.request_id][0].token_ids) for each in greedy]
    assert all(len(one) == len(other) for one, other in pairs)
    agreeing = [next((place for place, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    assert sum(agreeing) / sum(len(one) for one, _ in pairs) > 0.5
