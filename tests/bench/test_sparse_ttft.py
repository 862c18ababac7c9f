"""Times to the first token with overruled routers and selectors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.scripts import load

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("sparse_ttft")


@pytest.mark.parametrize(("layers", "heads", "share"), [(36, 8, 0.7), (3, 5, 0.5), (2, 4, 0.0), (2, 4, 1.0)])
def test_sparse_heads_are_spread_evenly(script: ModuleType, layers: int, heads: int, share: float) -> None:
    answers = script.classes(layers, heads, share)
    assert int((answers == 0).sum()) == round(layers * heads * share)
    assert max(abs(int((layer == 0).sum()) - heads * share) for layer in answers) < 1


def test_masks_have_their_density(script: ModuleType) -> None:
    masks = script.Masks(0.3)
    types = torch.tensor([[1, 1, -1]])
    chunks = [masks.instead(torch.zeros(17, 3, width, dtype=torch.bool), 16 * 128, types, 128) for width in (16, 32)]
    whole = torch.cat([torch.nn.functional.pad(chunks[0][:16], (0, 16)), chunks[1][:16]])
    causal = torch.ones(32, 32, dtype=torch.bool).tril()
    assert not any(chunk[16:].any() for chunk in chunks), "there is no such block"
    assert not whole[:, 2].any(), "a head that selects nothing"
    for head in (0, 1):
        assert not (whole[:, head] & ~causal).any()
        assert whole[:, head, 0].all() and whole[:, head].diagonal().all()
        assert abs(int(whole[:, head].sum()) / int(causal.sum()) - 0.3) < 0.05
    with pytest.raises(ValueError, match="one prompt"):
        masks.instead(torch.zeros(17, 3, 16, dtype=torch.bool), 16, types.expand(2, 3), 128)


@pytest.mark.slow
def test_a_run(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 384}
    options = argparse.Namespace(
        model=tmp_path,
        lengths=[600, 2300],
        modes=["dense", "xa-ssa", "mean"],
        sparse_heads=0.6,
        density=0.5,
        repetitions=1,
        profile=False,
        budget=600.0,
        set=settings,
    )
    saved: list[int] = []
    rows = script.run(options, lambda rows: saved.append(len(rows)))
    assert [(row["mode"], row["length"]) for row in rows] == [
        *(("dense", 2300), ("xa-ssa", 2300), ("dense", 600), ("xa-ssa", 600)),
        *(("mean", 2300), ("mean", 600)),
    ]
    assert saved == list(range(1, len(rows) + 1))
    found = {(row["mode"], row["length"]): row for row in rows}
    assert found["xa-ssa", 2300]["streaming heads"] == 0.6
    # Of 18 query blocks of streaming heads, the last one misses one block of 171.
    assert found["xa-ssa", 2300]["density"] == pytest.approx(0.6 * 170 / 171 + 0.4 * 0.5, abs=0.04)
    assert found["mean", 2300]["density"] == pytest.approx(0.5, abs=0.04)
    table = script.table([*rows, {"mode": "vLLM, dense", "length": 600, "seconds": found["mean", 600]["seconds"] * 2}])
    assert "| 600 | mean |" in table and table.count("2.00") == 1


def test_what_the_budget_leaves_out_is_told(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm.jsonl").write_text(
        'a log\n{"engine": "vllm"}\n{"workload": "prefill16k", "in_tok": 16384, "seconds": 0.5}\n'
    )
    rows = [{"mode": "fa-ssa", "length": 16384, "skipped": "the budget was spent"}, *script.of_vllm(tmp_path / "vllm.jsonl")]
    assert "| 16384 | fa-ssa |  | the budget was spent |  |  |" in script.table(rows)
    assert "| 16384 | vLLM, dense |  | 0.5 |  | 1.00 |" in script.table(rows)
