"""Foreign models on a GPU: what transformers says on a CPU, through CUDA graphs and the GPU's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import tiny_models
from support.models.architectures import quiet, survey_one
from support.models.foreign import decisions, engine, tokens_of

from headrace.models.capture import no_host_sync

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "kind", ["cohere2", "deepseek_v3", "gemma2", "gpt2", "granite", "llama", "mimo_v2_flash", "qwen3", "smollm3"]
)
def test_tokens_are_transformers_own(kind: str) -> None:
    """The run is in float32, with chunks, mixed batches, preemptions and prefix hits; logprobs are as near as the kernels' sums
    allow."""
    verdict = survey_one(kind, "cuda")
    assert verdict.runs, verdict.reason
    assert not verdict.fault or verdict.fault.startswith("logprobs differ")
    assert verdict.error <= 1e-3


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_graphs_change_nothing(kind: str, tmp_path: Path) -> None:
    """GPT-2 would look for padding on the host, if it knew of a padding token."""
    with quiet():
        tiny_models.save(tiny_models.model(kind), tmp_path)
        whole = engine(tmp_path, device="cuda", dtype="bfloat16")
        eager = engine(tmp_path, device="cuda", dtype="bfloat16", enforce_eager=True)
    assert decisions(whole)["CUDA graphs"][0] != "none"
    assert tokens_of(whole, [5, 6, 7], 20) == tokens_of(eager, [5, 6, 7], 20)


def test_what_waits_for_the_gpu_has_no_graphs(tmp_path: Path) -> None:
    """Capture is tried and fails. Grouped products read their groups' sizes on the host in float32, and not in bfloat16."""
    with quiet():
        tiny_models.save(tiny_models.model("mixtral"), tmp_path)
        told = decisions(engine(tmp_path, device="cuda", dtype="float32"))["CUDA graphs"]
    assert told[0] == "none"
    assert "model.layers.0.mlp" in told[1]


def test_a_wait_for_the_gpu_raises_before_a_capture_is_begun() -> None:
    x = torch.ones(4, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with no_host_sync():
        x.sum()
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == before


def test_weights_are_loaded_and_made_on_the_device(tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("qwen3"), tmp_path)
        for load_format in ("auto", "dummy"):
            llm = engine(tmp_path, device="cuda", dtype="bfloat16", load_format=load_format)
            assert decisions(llm)["our kernels for"][0].startswith("13 norms, 3 MLPs, 3 attentions")
            assert len(tokens_of(llm, [5, 6, 7])) == 6
