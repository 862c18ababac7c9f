"""Matrices in 32-bit words, as GPTQ and AWQ store them, mean what their packers packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.packers import Rounded

from headrace.errors import ConfigError
from headrace.kernels import native
from headrace.layers.linear import Linear, UnquantizedMethod
from headrace.models import registry
from headrace.parallel.shards import Cut
from headrace.quant.formats.find import find_scheme
from headrace.quant.groups import GroupCodes
from headrace.quant.native import NativeMethod
from headrace.quant.registry import QUANTIZATIONS, STORED, find
from headrace.weights.load import load_weights
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint

from .models import config, expected_parameters, files, parameters_of, planned, spec, tensors, without_errors

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NAME = "model.m.weight"


def opened(folder: Path, stored: dict[str, torch.Tensor], scheme: dict[str, Any]) -> ScaledCheckpoint:
    save_file({f"model.m.{leaf}": tensor for leaf, tensor in stored.items()}, folder / "model.safetensors")
    inner = SafetensorsCheckpoint([folder / "model.safetensors"])
    return ScaledCheckpoint(inner, find_scheme(config(quantization_config=scheme)))


def check(checkpoint: ScaledCheckpoint, meant: torch.Tensor) -> GroupCodes:
    assert list(checkpoint.tensors) == [NAME]
    assert checkpoint.tensors[NAME].shape == meant.shape
    assert torch.equal(checkpoint.read(NAME), meant)
    for axis, ranges in ((0, ((3, 17), (18, 19))), (1, ((0, 40), (65, 91)))):
        where = Slice(axis, ranges)
        assert torch.equal(checkpoint.read(NAME, where), where.of(meant))
    codes = checkpoint.codes(NAME)
    assert isinstance(codes, GroupCodes)
    assert torch.equal(codes.dequantize(), meant)
    return codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
def test_versions_of_gptq_differ_in_their_zero_points(bits: int, version: str | None, tmp_path: Path) -> None:
    """The first one stores them less 1, so that 0 wraps around."""
    made = Rounded(24, 96, bits=bits)
    made.zeros[0] = 0
    made = Rounded(24, 96, bits=bits)
    assert int(made.zeros.min()) == 0 or bits == 8
    scheme = GPTQ | {"bits": bits} | ({"checkpoint_format": version} if version else {})
    codes = check(opened(tmp_path, made.gptq(0 if version == "gptq_v2" else 1), scheme), made.meant)
    assert codes.bits == bits
    assert codes.zeros is not None
    assert torch.equal(codes.zeros, made.zeros)
    assert codes.scales.dtype == torch.float16
    assert codes.order is None


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zero_points_are_known_whatever_the_label(label: str, less: int, bits: int, tmp_path: Path) -> None:
    made = Rounded(24, 96, bits=bits, zero=2 ** (bits - 1))
    scheme = GPTQ | {"bits": bits, "sym": True, "checkpoint_format": label}
    check(opened(tmp_path, made.gptq(less), scheme), made.meant)


def test_symmetric_zero_points_that_are_not_are_refused(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, Rounded(24, 96).gptq(), GPTQ | {"sym": True})
    with pytest.raises(
        ConfigError, match=r"model\.m\.qzeros has zero points from 0 to 15, and symmetric ones are all 7 or all 8"
    ):
        checkpoint.read(NAME)


@pytest.mark.parametrize("group", [-1, 32, 40])
def test_groups_of_gptq(group: int, tmp_path: Path) -> None:
    """-1: all inputs. The last group may be short."""
    made = Rounded(24, 96, group=96 if group == -1 else group)
    codes = check(opened(tmp_path, made.gptq(), GPTQ | {"group_size": group}), made.meant)
    assert codes.scales.shape[1] == {-1: 1, 32: 3, 40: 3}[group]
    check(opened(tmp_path, made.gptq(g_idx=False), GPTQ | {"group_size": group}), made.meant)


@pytest.mark.parametrize("group", [-1, 32])
def test_act_order_of_gptq(group: int, tmp_path: Path) -> None:
    """Told by values, not by ``desc_act``."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)) // (96 if group == -1 else group)
    made = Rounded(24, 96, group=96 if group == -1 else group, order=order)
    codes = check(opened(tmp_path, made.gptq(), GPTQ | {"group_size": group}), made.meant)
    assert (codes.order is None) == (group == -1)
    for cut in (Cut("inputs", 8, 88, 96), Cut("outputs", 3, 20, 24)):
        part = codes.cut(cut)
        assert torch.equal(part.dequantize(), cut.of(made.meant))
        again = Cut(cut.along, 5, 9, cut.stop - cut.start)
        assert torch.equal(part.cut(again).dequantize(), again.of(cut.of(made.meant)))
    plain = check(opened(tmp_path, Rounded(24, 96).gptq(), GPTQ | {"desc_act": True}), Rounded(24, 96).meant)
    assert plain.order is None


def test_awq(tmp_path: Path) -> None:
    made = Rounded(24, 96)
    codes = check(opened(tmp_path, made.awq(), AWQ), made.meant)
    assert torch.equal(codes.codes, made.codes)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_round_has_the_layout_of_either(packing: str, tmp_path: Path) -> None:
    made = Rounded(24, 96)
    scheme = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    check(opened(tmp_path, made.awq() if "awq" in packing else made.gptq(), scheme), made.meant)


def test_the_converter_of_compressed_tensors_agrees_on_awq(tmp_path: Path) -> None:
    """A second opinion on the order of numbers in a word."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter
    from compressed_tensors.quantization import preset_name_to_scheme

    made = Rounded(24, 256, group=128)
    converter = AutoAWQConverter(targets=["re:.*m$"])
    held = {f"model.m.{leaf}": tensor for leaf, tensor in made.awq().items()}
    converted = {name.rpartition(".")[2]: tensor for name, tensor in converter.process(held).items()}
    scheme = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(converted, scheme)["weight"]
    ours = opened(tmp_path, made.awq(), AWQ | {"group_size": 128}).read(NAME)
    # The library multiplies in the scales' half precision.
    assert torch.equal(ours.half(), theirs)


@pytest.mark.parametrize(
    ("stored", "scheme", "message"),
    [
        ({"qzeros": None}, GPTQ, r"model\.m\.qzeros is missing: quant_method gptq means model\.m as int4"),
        ({"scales": None}, GPTQ, r"model\.m\.scales is missing"),
        ({"qweight": None}, GPTQ, r"model\.m\.qweight is missing"),
        ({"scales": torch.ones(4, 24)}, GPTQ, r"model\.m\.scales is of the shape \[4, 24\], not \[3, 24\]"),
        ({"qzeros": torch.zeros(3, 4)}, GPTQ, r"model\.m\.qzeros is stored as F32, not as I32"),
        ({"weight": torch.zeros(24, 96)}, GPTQ, r"model\.m\.weight is stored as F32, but model\.m\.g_idx is beside it"),
        ({"weight_scale": torch.zeros(24)}, GPTQ, r"model\.m\.weight_scale is no part of the matrix"),
        (
            {},
            GPTQ | {"modules_to_not_convert": ["m"]},
            r"model\.m\.g_idx \(I32\) is part of .* but modules_to_not_convert 'm': model\.m is stored as floats",
        ),
        ({}, GPTQ | {"dynamic": {r"-:.*\.m$": {}}}, r"but dynamic '-:\.\*"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rule_that_decided(
    stored: dict[str, Any], scheme: dict[str, Any], message: str, tmp_path: Path
) -> None:
    held = {leaf: tensor for leaf, tensor in (Rounded(24, 96).gptq() | stored).items() if tensor is not None}
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, held, scheme)


def quantised(
    hf_config: Any, rounded: dict[str, dict[str, Any]], pack: Callable[[Rounded], dict[str, torch.Tensor]] = Rounded.gptq
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(stored, meant) tensors of a tiny model whose matrices that contain a key are packed with these options."""
    held, meant = {}, {}
    for name, tensor in tensors(hf_config).items():
        options = next((one for key, one in rounded.items() if key in name), None)
        if options is None:
            held[name] = meant[name] = tensor
            continue
        made = Rounded(*tensor.shape, **options)
        meant[name] = made.meant
        held |= {f"{name.removesuffix('weight')}{leaf}": one for leaf, one in pack(made).items()}
    return held, meant


def load(folder: Path, hf_config: Any, held: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    save_file(held, folder / "model.safetensors")
    model = registry.build(spec(hf_config), "float32", "cpu")
    checkpoint = files(hf_config, "safetensors", [folder / "model.safetensors"])
    return model, load_weights(model, registry.name_table(model.spec), checkpoint, **options)


def test_a_model_whose_matrices_differ(tmp_path: Path) -> None:
    """In one fused matrix, k differs from q in groups and bits, and v is stored as floats; the output head is quantised."""
    scheme = GPTQ | {
        "lm_head": True,
        "dynamic": {r"+:.*\.k_proj": {"bits": 8, "group_size": 64}, r"-:.*\.v_proj": {}},
    }
    hf_config = config(quantization_config=scheme)
    plain: dict[str, Any] = {}
    held, meant = quantised(
        hf_config, {"k_proj": {"bits": 8, "group": 64}, "q_proj": plain, "o_proj": plain, "mlp": plain, "lm_head": plain}
    )
    # Writers give every matrix a bias.
    held["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)
    held["model.layers.1.self_attn.k_scale"] = torch.ones(1)
    model, report = load(tmp_path, hf_config, held)
    for name, expected in expected_parameters(hf_config, meant).items():
        assert torch.equal(parameters_of(model)[name], expected), name
    (decision,) = report.decisions
    assert decision.value == "11 of int4, groups of 32, integer zeros; 2 of int8, groups of 64, integer zeros"
    assert decision.reason == (
        "3 further matrices are stored as floats; zero points are read as checkpoint_format says they are stored; "
        "1 scales of the KV cache are not needed: it computes its own"
    )
    for quantization in ("stored", "int4"):
        _, report = load(tmp_path, hf_config, held, quantization=quantization)
        found = files(hf_config, "safetensors", [tmp_path / "model.safetensors"])
        assert planned(hf_config, found, quantization, "float32") == without_errors(report)
    held["model.layers.0.self_attn.q_proj.bias"][3] = 1
    with pytest.raises(ConfigError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path, hf_config, held)


def test_a_quantised_head_that_is_tied_is_refused(tmp_path: Path) -> None:
    hf_config = config(quantization_config=GPTQ | {"lm_head": True}, tie_word_embeddings=True)
    held, _ = quantised(hf_config, {"_proj": {}})
    held |= {f"lm_head.{leaf}": tensor for leaf, tensor in Rounded(96, 256).gptq().items()}
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight .* set tie_word_embeddings to false"):
        load(tmp_path, hf_config, held)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_codes_are_packed_for_the_cpu(quantization: str, tmp_path: Path) -> None:
    """Groups that 32 divides are kept as they are; in another order of inputs, the native kernels keep them."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)) // 128
    hf_config = config(quantization_config=GPTQ | {"group_size": 128, "lm_head": True})
    held, _ = quantised(hf_config, {"down_proj": {"group": 128}, "_proj": {"group": 128}, "lm_head": {"group": 128}})
    made = Rounded(256, 256, group=128, order=order)
    held |= {f"model.layers.0.self_attn.o_proj.{leaf}": tensor for leaf, tensor in made.gptq().items()}
    _, report = load(tmp_path, hf_config, held, quantization=quantization)
    errors = dict(report.errors)
    own = errors.pop("layers.0.self_attn.o_proj.weight")
    kernels = native.load()
    if kernels is None or kernels.tile == "portable":
        assert 0.001 < own < (0.12 if quantization == "int4" else 0.02)
    else:
        assert own == 0
    assert max(errors.values()) < 1e-2


@pytest.mark.parametrize("quantization", ["gptq", "gptq_v2", "awq"])
def test_codes_are_multiplied_as_they_are_stored(quantization: str, tmp_path: Path) -> None:
    """Every matrix of the layers is held exactly, without a copy in floats."""
    kernels = native.load()
    if kernels is None or kernels.tile == "portable":
        pytest.skip("no native products here")
    scheme = AWQ if quantization == "awq" else GPTQ | {"checkpoint_format": quantization}
    hf_config = config(quantization_config=scheme | {"group_size": 128})
    packers = {"gptq": Rounded.gptq, "gptq_v2": lambda made: made.gptq(0), "awq": Rounded.awq}
    held, meant = quantised(hf_config, {"_proj": {"group": 128}}, packers[quantization])
    model, report = load(tmp_path, hf_config, held, quantization="stored")
    assert report.errors and set(report.errors.values()) == {0.0}
    expected = expected_parameters(hf_config, meant)
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and path != "lm_head":
            assert isinstance(layer.method, NativeMethod)
            assert torch.equal(layer.method.dequantize(layer), expected[f"{path}.weight"].float())


def test_codes_are_kept_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes in another order of inputs are kept too, of a matrix that is alone; parts of a fused matrix in orders of their own
    become floats."""
    hf_config = config(quantization_config=GPTQ | {"group_size": 128, "lm_head": True})
    held, meant = quantised(hf_config, {"_proj": {"group": 128}, "lm_head": {"group": 128}})
    for name, seed in (("0.self_attn.o_proj", 1), ("1.self_attn.q_proj", 2)):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed)) // 128
        made = Rounded(256, 256, group=128, order=order)
        meant[f"model.layers.{name}.weight"] = made.meant
        held |= {f"model.layers.{name}.{leaf}": tensor for leaf, tensor in made.gptq().items()}
    # A CPU has kernels of its own, and runs the reference of these.
    monkeypatch.setitem(QUANTIZATIONS["cpu"], STORED, find(STORED, "cuda"))
    model, report = load(tmp_path, hf_config, held, quantization=STORED)
    assert set(report.errors.values()) == {0.0}
    floats = {"layers.1.self_attn.qkv_proj"}
    for name, expected in expected_parameters(hf_config, meant).items():
        path = name.removesuffix(".weight")
        layer = model.get_submodule(path)
        if isinstance(layer, Linear):
            assert isinstance(layer.method, UnquantizedMethod) == (path in floats), path
            assert torch.equal(layer.method.dequantize(layer), expected)
    reasons = {decision.reason for decision in report.decisions}
    assert any("in several orders" in reason for reason in reasons)
