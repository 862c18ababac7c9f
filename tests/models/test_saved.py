"""Models as transformers saves them: the directory's config and tensors, under the names that checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import mixtures
from support.models.cases import CASES, SMALL, pair, prompt
from support.models.export import export
from support.models.harness import Bench
from support.models.packers import Rounded
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.config import EngineArgs
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.quant.float_codes import TileCodes
from headrace.sources.files import find_model
from headrace.weights.load import load_weights

FIRST = {model_class: name for name, (model_class, _, _) in reversed(CASES.items())}
ONE_EACH = list(FIRST.values())
"""First case of every family."""


def load(folder: Path) -> Decoder:
    files = find_model(EngineArgs(model=str(folder)))
    spec = registry.model_spec(files.config)
    model = registry.build(spec, "float32", "cpu", to_load=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_weights(model, registry.name_table(spec), files, device=torch.device("cpu"))
    return model


def same(model: Decoder, other: Decoder) -> None:
    held, expected = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, other))
    assert set(held) == set(expected)
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name
    angles, others = (one.rotary._tables for one in (model, other))
    assert [table._table.device for table in angles] == [table._table.device for table in others]


@pytest.mark.parametrize("name", [*ONE_EACH, "gemma4-shared", "gemma4-experts", "llama-uneven"])
def test_a_saved_model_is_loaded(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name)
    theirs.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    same(loaded, ours)
    if name != "gemma4-shared":
        assert loaded.spec == ours.spec


@pytest.mark.parametrize("name", [*ONE_EACH, "gemma4-shared"])
def test_an_exported_model_is_loaded(name: str, tmp_path: Path) -> None:
    """The table of names works both ways."""
    theirs, ours = pair(name)
    theirs.config.save_pretrained(tmp_path)
    exported = {key: tensor.contiguous() for key, tensor in export(registry.name_table(ours.spec), ours)}
    save_file(exported, tmp_path / "model.safetensors")
    same(load(tmp_path), ours)


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """gpt-oss as it is published: experts in blocks of 4 bits, outputs before inputs, rows of gate and up in turns."""
    # Wide enough for blocks of 32.
    sizes = SMALL | mixtures.GPT_OSS | {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 8}
    config = GptOssConfig(**sizes, architectures=["GptOssForCausalLM"])
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    held = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            held[name] = tensor.contiguous()
            continue
        experts, inputs, outputs = tensor.shape
        held[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        meant = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])
        tensor.copy_(meant if meant.shape == tensor.shape else meant.mT)
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(tmp_path)
    save_file(held, tmp_path / "model.safetensors")
    bench = Bench(load(tmp_path))
    ids = prompt(10)
    got = bench.prefill(bench.sequence(ids), 4)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)


def test_other_names_of_mimo(tmp_path: Path) -> None:
    """The published files differ: sinks under another name, experts apart, layers that predict further tokens beside."""
    theirs, ours = pair("mimo")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = {
        name.replace("self_attn.sinks", "self_attn.attention_sink_bias"): tensor for name, tensor in load_file(path).items()
    }
    assert any(name.endswith("experts.7.down_proj.weight") for name in held)
    assert sum(name.endswith("attention_sink_bias") for name in held) == 2
    held["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(3)
    save_file(held, path)
    same(load(tmp_path), ours)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
TILES = {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["lm_head"]}
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("llama", GPTQ),
    "awq-biases": ("qwen2", AWQ),
    "fp8-experts": ("qwen3-moe", TILES),
    "w4afp8-latent": ("deepseek-v3", {"quant_method": "w4afp8", "group_size": 4, "weight_block_size": [16, 32]}),
}


def quantised(name: str, tensor: torch.Tensor, scheme: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(stored tensors, what they mean) of a matrix."""
    rows, columns = tensor.shape
    method, module = scheme["quant_method"], name.removesuffix(".weight")
    if method == "w4afp8" and ".experts." in name:
        codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        scales = torch.rand(rows, columns // 4) / 20
        pairs = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        meant = codes.float() * scales.repeat_interleave(4, 1)
        return {name: pairs, f"{module}.weight_scale_inv": scales, f"{module}.input_scale": torch.ones(1)}, meant
    if method in ("fp8", "w4afp8"):
        codes, scales = (100 * tensor).to(torch.float8_e4m3fn), torch.rand(-(-rows // 16), -(-columns // 32)) / 50
        return {name: codes, f"{module}.weight_scale_inv": scales}, TileCodes(codes, scales, (16, 32)).dequantize()
    made = Rounded(rows, columns, group=16, order=torch.randperm(columns) // 16 if method == "gptq" else None)
    return {f"{module}.{leaf}": one for leaf, one in (made.awq() if method == "awq" else made.gptq()).items()}, made.meant


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_model_computes_what_its_floats_do(name: str, tmp_path: Path) -> None:
    case, scheme = QUANTISED[name]
    theirs, _ = pair(case)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    held, meant = {}, {}
    for key, tensor in load_file(path).items():
        stored, meant[key] = {key: tensor}, tensor
        if key.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")):
            stored, meant[key] = quantised(key, tensor, scheme)
        held |= stored
    assert len(held) > len(meant)
    save_file(meant, path)
    # As in pair(), where the experts of transformers are eager ones.
    theirs = type(theirs).from_pretrained(tmp_path, experts_implementation="eager").eval()
    save_file(held, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": scheme}))
    bench = Bench(load(tmp_path))
    ids = prompt(10)
    got = bench.prefill(bench.sequence(ids), 4)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
