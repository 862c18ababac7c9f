"""The random checkpoints that engines are compared with are what the formats' readers read."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

import pytest

from headrace.config import EngineArgs
from headrace.models import registry
from headrace.models.implementation import choose
from headrace.sources.files import find_model
from headrace.weights.load import load_weights

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "quantised_checkpoint.py"))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5, "vocab_size": 64, "tie_word_embeddings": False}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES, **HEADS}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "mlp_only_layers": []}
MIXTURE = DENSE | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
CODES = {
    "int4": ("gptq", "gptq_asym", "gptq_act_order", "auto_round", "awq", "w4a16", "w4a16_asym"),
    "int8": ("gptq_8bit", "w8a16", "int8"),
    "nvfp4": ("nvfp4", "modelopt_nvfp4"),
    "mxfp4": ("mxfp4",),
}


@pytest.mark.parametrize(
    ("name", "config", "count"), [("fp8_block", DENSE, 7), *((name, MIXTURE, 10) for name in SCRIPT["FORMATS"])]
)
def test_every_tensor_has_a_place(name: str, config: dict[str, object], count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "written"
    SCRIPT["write"](argparse.Namespace(model=tmp_path, folder=folder, format=name, layers=1, seed=0, device="cpu"))
    args = EngineArgs(model=str(folder))
    found = find_model(args)
    model = registry.build(choose(args, found).spec, "float32", "cpu")
    report = load_weights(model, registry.name_table(model.spec), found)
    stored = report.decisions[0].value
    if name == "w4afp8":
        assert "4 of e4m3" in stored and "6 of int4" in stored
    else:
        codes = next((codes for codes, names in CODES.items() if name in names), "e4m3")
        assert stored.startswith(f"{count} of {codes}")
    for parameter in model.parameters():
        # Random numbers of this deviation were written, and read again.
        assert parameter.dim() < 2 or 0.017 < float(parameter.float().std()) < 0.023
