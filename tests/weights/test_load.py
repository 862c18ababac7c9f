"""Loading: every tensor to its rows, or an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models.export import export
from transformers import Qwen2Config

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.size import weight_bytes
from headrace.quant.packed import PackedMethod
from headrace.weights.load import load_weights
from headrace.weights.report import LoadReport

from .models import config, expected_parameters, files, parameters_of, planned, spec, tensors, without_errors, write_safetensors


def load(
    hf_config: object, kind: str, paths: list[Path], *, dtype: str = "float32", **options: object
) -> tuple[Decoder, LoadReport]:
    model = registry.build(spec(hf_config), dtype, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    report = load_weights(model, registry.name_table(model.spec), files(hf_config, kind, paths), **options)
    return model, report


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_safetensors(tmp_path: Path, shards: int, changes: dict[str, object]) -> None:
    hf_config = config(**changes)
    weights = tensors(hf_config)
    model, report = load(hf_config, "safetensors", write_safetensors(tmp_path, weights, shards))
    expected = expected_parameters(hf_config, weights)
    got = parameters_of(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert report.num_tensors == len(weights)
    assert report.nbytes_read == sum(tensor.nbytes for tensor in weights.values())
    assert report.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert report.quantization == "none"
    assert report.errors == {}
    assert report.seconds > 0


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    hf_config = config()
    weights = {name: tensor.to(stored) for name, tensor in tensors(hf_config).items()}
    model, _ = load(hf_config, "safetensors", write_safetensors(tmp_path, weights), dtype=dtype)
    expected = expected_parameters(hf_config, weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(getattr(torch, dtype)))


def test_round_trip(tmp_path: Path) -> None:
    """Exported weights can be loaded, here and by transformers."""
    hf_config = config(Qwen2Config, tie_word_embeddings=True)
    weights = tensors(hf_config)
    model, _ = load(hf_config, "safetensors", write_safetensors(tmp_path, weights))
    exported = dict(export(registry.name_table(model.spec), model))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(hf_config)
    missing, unexpected = theirs.load_state_dict(exported, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []


# Errors


def broken(tmp_path: Path, weights: dict[str, torch.Tensor], hf_config: object | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(hf_config or config(), "safetensors", write_safetensors(tmp_path, weights))
    return str(error.value)


def test_missing(tmp_path: Path) -> None:
    weights = tensors(config())
    del weights["model.layers.1.self_attn.k_proj.weight"]
    message = broken(tmp_path, weights)
    assert "lacks model.layers.1.self_attn.k_proj.weight" in message


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    hf_config = config(tie_word_embeddings=False)
    weights = tensors(hf_config)
    del weights["lm_head.weight"]
    assert "lacks lm_head.weight" in broken(tmp_path, weights, hf_config)


def test_many_missing_are_counted(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tensors(config()).items() if ".0." not in name}
    assert "and 4 more" in broken(tmp_path, weights)


def test_unexpected(tmp_path: Path) -> None:
    weights = tensors(config()) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)}
    message = broken(tmp_path, weights)
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert "model-00000.safetensors" in message


def test_misshapen(tmp_path: Path) -> None:
    weights = tensors(config()) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(500, 256)}
    message = broken(tmp_path, weights)
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert "[500, 256]" in message
    assert "[512, 256]" in message


def test_twice(tmp_path: Path) -> None:
    weights = tensors(config())
    (path,) = write_safetensors(tmp_path, weights)
    save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is in .* and in more\.safetensors too"):
        load(config(), "safetensors", [path, tmp_path / "more.safetensors"])


def test_integers_are_no_weights(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    weights = tensors(config())
    weights[name] = weights[name].to(torch.int8)
    message = broken(tmp_path, weights)
    assert name in message
    assert "I8" in message


def test_a_broken_file(tmp_path: Path) -> None:
    (path,) = write_safetensors(tmp_path, tensors(config()))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(config(), "safetensors", [path])


def test_a_parameter_that_nothing_fills(tmp_path: Path) -> None:
    hf_config = config()
    model = registry.build(spec(hf_config), "float32", "cpu")
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="parameter extra"):
        load_weights(model, registry.name_table(model.spec), files(hf_config, "dummy", []))


def test_ignorable_tensors(tmp_path: Path) -> None:
    weights = tensors(config()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}
    load(config(), "safetensors", write_safetensors(tmp_path, weights))


# Ties


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8", "stored"])
def test_a_tied_head_may_be_in_the_file(tmp_path: Path, quantization: str) -> None:
    hf_config = config(tie_word_embeddings=True)
    weights = tensors(hf_config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model, _ = load(hf_config, "safetensors", write_safetensors(tmp_path, weights), dtype="bfloat16", quantization=quantization)
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"].bfloat16())
    if quantization != "int8":
        assert model.lm_head.weight is model.embed_tokens.weight


def test_a_tied_head_must_be_equal(tmp_path: Path) -> None:
    hf_config = config(tie_word_embeddings=True)
    weights = tensors(hf_config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1e-3
    assert "ties lm_head.weight to embed_tokens.weight" in broken(tmp_path, weights, hf_config)
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    assert "[95, 256]" in broken(tmp_path, weights, hf_config)


# Progress, memory, dummies


@pytest.mark.parametrize("quantization", ["none", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["safetensors", "dummy"])
def test_progress(tmp_path: Path, kind: str, quantization: str) -> None:
    hf_config = config(tie_word_embeddings=True)
    paths = write_safetensors(tmp_path, tensors(hf_config), 2) if kind == "safetensors" else []
    seen: list[tuple[int, int]] = []
    _, report = load(hf_config, kind, paths, dtype="bfloat16", quantization=quantization, progress=lambda *at: seen.append(at))
    done = [at for at, _ in seen]
    assert {total for _, total in seen} == {report.nbytes_read}
    assert done == sorted(done)
    assert done[-1] == report.nbytes_read
    assert len(set(done)) == report.num_tensors


def test_dummy_weights_follow_from_the_seed() -> None:
    hf_config = config()

    def weights(seed: int) -> dict[str, torch.Tensor]:
        return parameters_of(load(hf_config, "dummy", [], seed=seed)[0])

    first, again, other = weights(3), weights(3), weights(4)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.05)
            assert abs(float(tensor.mean())) < 1e-3


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("with_or_without_native")
def test_packed(tmp_path: Path, quantization: str, tied: bool) -> None:
    """Every Linear is packed, its weights are near the checkpoint's, and the report adds up."""
    hf_config = config(tie_word_embeddings=tied, attention_bias=True)
    weights = tensors(hf_config)
    model, report = load(
        hf_config, "safetensors", write_safetensors(tmp_path, weights), dtype="bfloat16", quantization=quantization
    )
    expected = expected_parameters(hf_config, weights)
    packed = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
    assert all(isinstance(module.method, PackedMethod) for module in packed.values())
    assert len(packed) == 2 * 4 + 1
    assert report.errors.keys() == {f"{path}.weight" for path in packed}
    for path, module in packed.items():
        source = "embed_tokens.weight" if path == "lm_head" and tied else f"{path}.weight"
        error = float((module.method.dequantize(module) - expected[source]).norm() / expected[source].norm())
        assert error < (0.01 if quantization == "int8" or path == "lm_head" else 0.12)
        assert report.errors[f"{path}.weight"] == pytest.approx(error, rel=0.1)
    assert len(report.decisions) == 5
    assert all(decision.reason for decision in report.decisions)
    bias = expected["layers.0.self_attn.qkv_proj.bias"]
    torch.testing.assert_close(model.layers[0].self_attn.qkv_proj.bias.float(), bias, rtol=1e-2, atol=1e-4)
    assert model.logits(torch.randn(2, 256).bfloat16()).dtype == torch.float32


@pytest.mark.usefixtures("with_or_without_native")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8", "fp8_per_block"])
def test_packed_memory_is_what_the_model_holds(quantization: str, tied: bool) -> None:
    """And no more than was estimated before: hardly less where compiled kernels hold integers, without copies."""
    hf_config = config(tie_word_embeddings=tied)
    model, report = load(hf_config, "dummy", [], dtype="bfloat16", quantization=quantization)
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    assert report.nbytes == sum(unique.values())
    copies = "second copy of packed weights" in {line.name for line in report.memory}
    estimate = weight_bytes(model.spec, "bfloat16", quantization, "cpu", copies=copies)
    assert report.nbytes <= estimate
    if quantization in ("int4", "int8"):
        assert report.nbytes > 0.95 * estimate


@pytest.mark.usefixtures("with_or_without_native")
@pytest.mark.parametrize("quantization", ["none", "int4", "int8", "fp8", "fp8_per_block"])
def test_formats_are_known_before_loading(quantization: str) -> None:
    hf_config = config(tie_word_embeddings=False)
    _, report = load(hf_config, "dummy", [], dtype="bfloat16", quantization=quantization)
    assert planned(hf_config, files(hf_config, "dummy", []), quantization) == without_errors(report)


def test_what_cannot_be_packed_is_refused() -> None:
    hf_config = config(intermediate_size=40)
    with pytest.raises(ConfigError, match=r"int4 cannot hold layers\.0\.mlp\.down_proj") as error:
        load(hf_config, "dummy", [], dtype="bfloat16", quantization="int4")
    assert error.value.param == "quantization"
    with pytest.raises(ConfigError, match="quantization must be"):
        load(config(), "dummy", [], quantization="int5")
