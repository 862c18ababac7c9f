"""Matrices that are left in floats, and the output head in a format of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.size import weight_bytes
from headrace.weights.load import load_weights
from headrace.weights.report import LoadReport

from .models import config, files, spec, tensors, write_safetensors


def load(hf_config: Any, paths: list[Path] | None = None, **options: Any) -> tuple[Decoder, LoadReport]:
    model = registry.build(spec(hf_config), "bfloat16", "cpu", to_load=True)
    found = files(hf_config, "dummy" if paths is None else "safetensors", paths or [])
    report = load_weights(model, registry.name_table(model.spec), found, device=torch.device("cpu"), **options)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    assert report.nbytes == sum(held.values())
    return model, report


def in_floats(model: Decoder) -> set[str]:
    return {path for path, layer in model.named_modules() if isinstance(layer, Linear) and "weight" in layer._parameters}


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (("re:.*down_proj",), {"layers.0.mlp.down_proj", "layers.1.mlp.down_proj"}),
        (("model.layers.1.self_attn.k_proj",), {"layers.1.self_attn.qkv_proj"}),
        (
            ("layers.0.mlp", "o_proj"),
            {"layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj"} | {f"layers.{i}.self_attn.o_proj" for i in (0, 1)},
        ),
    ],
)
def test_matrices_that_are_named_stay_floats(quantization: str, ignore: tuple[str, ...], left: set[str]) -> None:
    hf_config = config(tie_word_embeddings=False, num_hidden_layers=2)
    model, report = load(hf_config, quantization=quantization, ignore=ignore)
    assert in_floats(model) - {"lm_head"} == left
    assert report.nbytes <= weight_bytes(model.spec, "bfloat16", quantization, "cpu", ignore=ignore)
    if quantization == "fp8":
        assert weight_bytes(model.spec, "bfloat16", "fp8", "cpu") < weight_bytes(
            model.spec, "bfloat16", "fp8", "cpu", ignore=ignore
        )
    reasons = {line.reason for line in report.decisions if line.value == "floats"}
    assert any(f"quantization_ignore '{ignore[0]}'" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("pattern", "message"), [("mlp.down", "no matrix of the model by 'mlp.down'"), ("re:(", "no regular expression")]
)
def test_patterns_that_name_nothing_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(config(), quantization="fp8", ignore=("o_proj", pattern))
    assert caught.value.param == "quantization_ignore"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("quantization", "head"), [("none", "fp8"), ("fp8", "fp8_per_block"), ("int4", "fp8"), ("fp8", "int8"), ("fp8", "int4")]
)
def test_the_head_has_a_format_of_its_own(quantization: str, head: str, tied: bool) -> None:
    """A tied one is a second copy: embeddings are looked up in floats."""
    hf_config = config(tie_word_embeddings=tied, vocab_size=256)
    model, report = load(hf_config, quantization=quantization, quantize_head=head)
    plain, _ = load(hf_config)
    assert "lm_head" not in in_floats(model)
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight)
    assert report.nbytes <= weight_bytes(model.spec, "bfloat16", quantization, "cpu", head)
    exact = plain.lm_head.weight.float()
    assert 0 < (model.lm_head.method.dequantize(model.lm_head) - exact).norm() / exact.norm() < 0.04
    hidden = torch.randn(2, model.spec.hidden_size).bfloat16()
    torch.testing.assert_close(model.logits(hidden), plain.logits(hidden), rtol=0.1, atol=0.1)
    assert model.logits(hidden).dtype == torch.float32


def test_the_head_stays_in_floats_if_asked_to() -> None:
    model, report = load(config(tie_word_embeddings=False), quantization="int4", quantize_head="none")
    assert in_floats(model) == {"lm_head"}
    assert report.nbytes <= weight_bytes(model.spec, "bfloat16", "int4", "cpu", "none")


@pytest.mark.parametrize("coded", [False, True])
def test_a_head_that_a_checkpoint_quantised_is_kept(tmp_path: Path, coded: bool) -> None:
    weights = {name: one.bfloat16() for name, one in tensors(config(tie_word_embeddings=False)).items()}
    stored = {}
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name and (coded or name != "lm_head.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 448
            stored[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
        else:
            stored[name] = weight
    floats = [] if coded else ["lm_head"]
    hf_config = config(
        tie_word_embeddings=False, quantization_config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": floats}
    )
    model, report = load(hf_config, write_safetensors(tmp_path, stored), quantization="stored")
    assert ("lm_head" in in_floats(model)) != coded
    assert report.nbytes <= weight_bytes(model.spec, "bfloat16", "stored", "cpu")
    if coded:
        exact = stored["lm_head.weight"].float() * stored["lm_head.weight_scale"]
        assert torch.equal(model.lm_head.method.dequantize(model.lm_head), exact)


def test_codes_under_the_names_of_a_model_with_pictures(tmp_path: Path) -> None:
    """Their prefix is another one, as is that of patterns."""
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["model.language_model.layers.0.mlp"]}
    hf_config = config(Gemma3TextConfig, quantization_config=scheme)
    hf_config.architectures = ["Gemma3ForCausalLM"]
    held = {}
    for name, tensor in tensors(hf_config).items():
        other = name.replace("model.", "model.language_model.", 1)
        if not name.endswith("_proj.weight") or "layers.0.mlp" in name:
            held[other] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        held[other] = (tensor * 4000).to(torch.float8_e4m3fn)
        held[f"{other}_scale_inv"] = torch.full((rows, columns), 2.0**-12)
    model, report = load(hf_config, write_safetensors(tmp_path, held))
    assert report.decisions[0].value.startswith("11 of e4m3, tiles of 128 x 128")
    exact = held["model.language_model.layers.1.mlp.down_proj.weight"].float() * 2.0**-12
    assert torch.equal(model.get_parameter("layers.1.mlp.down_proj.weight"), exact.bfloat16())
