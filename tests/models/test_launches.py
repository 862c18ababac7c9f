"""A decode step launches what the documentation says: no operation creeps in unseen."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.models.cases import pair, prompt
from support.models.harness import Bench

from headrace.kernels import gpu

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted where kernels are interpreted"),
]
QUICK = ["qwen3-moe", "deepseek-v2"]
SLOW = [
    "mimo",
    *("llama-biases", "qwen3", "qwen3-uneven-wide-v", "gemma3", "gemma3-capped", "gemma4", "gemma4-shared", "gemma4-k-is-v"),
    *("gemma4-experts", "mimo-groups", "qwen3-moe-step", "ernie-moe", "ernie-moe-biases", "deepseek-v2-lite", "deepseek-v3"),
    *("gpt-oss", "gpt-oss-clamped"),
]
PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"


@pytest.mark.slow
def test_the_table_is_what_is_launched() -> None:
    from models import launches

    page = PAGE.read_text()
    assert launches.written(page) == page, "PYTHONPATH=tests python -m models.launches --write docs/gpus.md"


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_the_kernels_of_gpus_say_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, in float32, of prompts and then of several rows at once."""
    _, ours = pair(case)
    prompts = [prompt(length) for length in (3, 9)]
    expected, expected_logits = Bench(ours, "reference").generate(prompts, 2)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    tokens, logits = Bench(ours, "triton", seed=3).generate(prompts, 2)
    assert tokens == expected
    for got, wanted in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(got.log_softmax(-1), wanted.log_softmax(-1), atol=1e-4, rtol=0)


def test_nothing_comes_between_the_products_of_an_adapter() -> None:
    """A's kernel, the layer's own product and B's kernel follow each other: work of the host or an operation of PyTorch in
    between would leave the GPU idle, and B could not be read while the kernel before still runs."""
    from models import launches

    adapted = launches.of_case("llama", adapters=True)[0]
    assert adapted.others == []
    products = [at for at, name in enumerate(adapted.names) if name in launches.PRODUCTS]
    assert len(products) == adapted.ours.count("shrink") == adapted.ours.count("expand") == 4
    for at in products:
        assert adapted.names[at - 1 : at + 2] == ("ours:shrink", "linear", "ours:expand")


def test_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation more in a layer is an operation more in the count; views and empty tensors are none."""
    from headrace.kernels.activation import ACTIVATIONS
    from models import launches

    before = launches.of_case("llama")[0]
    act = ACTIVATIONS["silu"]
    monkeypatch.setitem(ACTIVATIONS, "silu", lambda x: 2 * act(x.view(x.shape)[:, None].squeeze(1)))
    after = launches.of_case("llama")[0]
    assert (before.others, after.others) == ([], ["mul"])
    assert before.ours == after.ours
    assert before.products == after.products == ["linear"] * 4
