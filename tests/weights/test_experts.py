"""Experts of quantised checkpoints are held as they are stored, whole and cut for ranks, and say what their floats say."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.packers import Rounded, words
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from headrace.errors import ConfigError
from headrace.kernels.native import load
from headrace.layers.moe import Experts
from headrace.layers.stored import QuantSpec, StoredMatrix
from headrace.model_spec import MoeSpec
from headrace.models import registry
from headrace.models.kinds import from_files
from headrace.models.size import weight_bytes
from headrace.models.update import weight_update
from headrace.quant.experts import CodedExperts, ExpertsFacts, KeepExperts
from headrace.quant.native_experts import NativeExperts
from headrace.quant.registry import QUANTIZATIONS, STORED, find
from headrace.weights.load import load_weights

from .experts import (
    ACT_ORDER,
    DEEPSEEK,
    FORMATS,
    INNER,
    QWEN,
    ROUNDED,
    SIZES,
    Packed,
    in_groups,
    loaded,
    ordered,
    read_again,
    rounding_errors,
    same_answers,
    same_experts,
    saved,
    saved_gpt_oss,
    with_heads,
)
from .models import files, tensors


@pytest.fixture(autouse=True)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Uses the methods of a GPU, unless a test asks for those of a CPU's kernels too."""
    found, kernels = getattr(request, "param", CodedExperts), load()
    if found is NativeExperts and (kernels is None or kernels.tile == "portable"):
        pytest.skip("no native products here")
    if found is CodedExperts:
        stored = dataclasses.replace(find(STORED, "cpu"), experts=find(STORED, "cuda").experts)
        monkeypatch.setitem(QUANTIZATIONS["cpu"], STORED, stored)
    return found


both = pytest.mark.parametrize("method", [CodedExperts, NativeExperts], ids=["gpu", "cpu"], indirect=True)


@both
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [Qwen3MoeConfig, DeepseekV3Config], ids=["qwen3", "deepseek"])
def test_stored_experts_are_kept(kind: type[PretrainedConfig], name: str, method: type, tmp_path: Path) -> None:
    hf_config = saved(tmp_path, kind, QWEN if kind is Qwen3MoeConfig else DEEPSEEK, name)
    (held, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    experts = same_experts(held, floats, method)
    native = method is NativeExperts
    same_answers(held, floats, 1e-3 if native else 0.05 if name in ROUNDED else 1e-5)
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    assert "whose numbers are kept" in decision.reason and "no rounding of weights" in decision.reason
    nbytes = sum(line.nbytes for line in report.memory if line.name == "packed weights")
    assert nbytes == sum(buffer.nbytes for one in experts for buffer in one.buffers())
    numbers, eight = len(experts) * 4 * 3 * 128 * INNER, name in ("blocks", "outputs", "tensor")
    if native:
        bits_with_scales = 9 if eight else 5
        assert nbytes == numbers * bits_with_scales // 8
    else:
        assert nbytes < (1.1 if eight else 0.75) * numbers


@both
def test_mxfp4_of_gpt_oss(method: type, tmp_path: Path) -> None:
    """With rows of gate and up in turns, biases, and a clamped activation."""
    hf_config = saved_gpt_oss(tmp_path)
    (held, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    same_experts(held, floats, method)
    same_answers(held, floats, 1e-3 if method is NativeExperts else 1e-5)
    value = "8 bits, groups of 32, native" if method is NativeExperts else "MXFP4, groups of 32"
    assert any(one.value == value for one in report.decisions)


@both
@pytest.mark.parametrize(("size", "whole"), [(3, False), (2, False), (2, True)], ids=["thirds", "halves", "whole experts"])
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_ranks_hold_parts_of_codes(name: str, size: int, whole: bool, method: type, tmp_path: Path) -> None:
    """Three ranks of 64 channels: a cut splits the blocks of 128 inputs and outputs, and groups of integers end with it. Two of
    192: the second one's blocks begin before its first channel."""
    fields = QWEN if whole or size == 3 else QWEN | {"moe_intermediate_size": 384}
    hf_config = saved_gpt_oss(tmp_path) if name == "mxfp4" else saved(tmp_path, Qwen3MoeConfig, fields, name)
    if size == 3:
        hf_config = with_heads(hf_config, tmp_path, {"num_attention_heads": 6, "num_key_value_heads": 3})
    for rank in range(size):
        (held, _), (floats, _) = (
            loaded(hf_config, tmp_path, how, rank, tensor=size, whole_experts=whole) for how in ("stored", "none")
        )
        same_experts(held, floats, method)


def test_groups_that_a_cut_splits_become_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four ranks holds 64 of 256 inputs, which are in groups of 128."""
    monkeypatch.setitem(FORMATS, "wide", in_groups(128))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN | {"moe_intermediate_size": 256, "num_key_value_heads": 4}, "wide")
    for rank in range(4):
        (held, _), (floats, _) = (loaded(hf_config, tmp_path, how, rank, tensor=4) for how in ("stored", "none"))
        same_experts(held, floats, CodedExperts)


def test_inputs_in_another_order_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "ordered", (ACT_ORDER, ordered))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "ordered")
    held = load_file(tmp_path / "model.safetensors")
    # An expert whose inputs are in order.
    for name in [name for name in held if ".layers.1.mlp.experts.2." in name and name.endswith("g_idx")]:
        held[name] = held[name].flip(0).contiguous()
    save_file(held, tmp_path / "model.safetensors")
    (held_model, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    assert any("whose numbers are kept" in one.reason for one in report.decisions if "experts" in one.name)
    same_experts(held_model, floats, CodedExperts)
    same_answers(held_model, floats, 1e-5)
    orders = held_model.get_submodule("layers.1.mlp.experts").get_buffer("down_proj_order")
    assert torch.equal(orders[2], torch.arange(INNER, dtype=torch.int32)) and not torch.equal(orders[1], orders[2])


def test_ranks_with_inputs_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the inputs has any number of each group: experts become floats. Whole experts stay as they are."""
    monkeypatch.setitem(FORMATS, "ordered", (ACT_ORDER, ordered))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN | {"moe_intermediate_size": 256, "num_key_value_heads": 4}, "ordered")
    _, report = loaded(hf_config, tmp_path, "stored", 1, tensor=4)
    assert any("cuts groups of inputs in another order" in one.reason for one in report.decisions)
    (whole, _), (floats, _) = (loaded(hf_config, tmp_path, how, 1, tensor=4, whole_experts=True) for how in ("stored", "none"))
    same_experts(whole, floats, CodedExperts)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("gate_proj", lambda held: held.roll(32), "gate and up of expert 2 have inputs in different orders"),
        ("down_proj", lambda held: held.clamp_max(3), "groups of several sizes, are not kept"),
    ],
)
def test_orders_that_no_product_takes_are_refused_by_name(
    name: str, value: Callable[[torch.Tensor], torch.Tensor], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "ordered", (ACT_ORDER, ordered))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "ordered")
    held = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.2.{name}.g_idx"
    held[name] = value(held[name]).contiguous()
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{error}: set quantization none"):
        loaded(hf_config, tmp_path, "stored")


def eight_bits(weight: torch.Tensor) -> Packed:
    return Rounded(*weight.shape, bits=8).gptq()


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (
            (ACT_ORDER | {"bits": 8, "sym": False}, lambda weight: Rounded(*weight.shape, bits=8).gptq()),
            "int8, groups of 32 with minima",
        ),
        (in_groups(16), "int4, groups of 16"),
    ],
    ids=["8 bits", "groups of 16"],
)
def test_other_integers_are_kept(form: Any, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "other", form)
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "other")
    (held, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    assert any(one.value == value for one in report.decisions)
    same_answers(held, floats, 1e-5)
    same_experts(held, floats, CodedExperts, 1e-6)


def test_experts_that_are_named_stay_floats(tmp_path: Path) -> None:
    hf_config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **{**SIZES, **QWEN, "num_key_value_heads": 4})
    save_file(tensors(hf_config), tmp_path / "model.safetensors")
    spec = registry.model_spec(hf_config)
    model = registry.build(spec, "bfloat16", "cpu", to_load=True)
    found = files(hf_config, "safetensors", [tmp_path / "model.safetensors"])
    ignore = ("layers.1.mlp.experts",)
    report = load_weights(
        model, registry.name_table(spec), found, device=torch.device("cpu"), quantization="fp8", ignore=ignore
    )
    kinds = [type(one.method) is CodedExperts for one in model.modules() if isinstance(one, Experts)]
    assert kinds == [True, False]
    assert any("quantization_ignore" in one.reason and "experts" in one.name for one in report.decisions)
    assert report.nbytes <= weight_bytes(spec, "bfloat16", "fp8", "cpu", ignore=ignore)
    assert weight_bytes(spec, "bfloat16", "fp8", "cpu") < weight_bytes(spec, "bfloat16", "fp8", "cpu", ignore=ignore)


def test_ranks_with_other_experts_have_the_largest_static_scale_of_all(tmp_path: Path) -> None:
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "w4afp8")
    held = load_file(tmp_path / "model.safetensors")
    scales = {name: one for name, one in held.items() if name.endswith("input_scale") and ".layers.0." in name}
    for index, name in enumerate(scales):
        held[name] = torch.tensor(0.01 * (1 + index))
    save_file(held, tmp_path / "model.safetensors")
    for rank in range(2):
        model, _ = loaded(hf_config, tmp_path, "stored", rank, tensor=2, whole_experts=True)
        experts = next(one for one in model.modules() if isinstance(one, Experts))
        for matrix, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            largest = max(float(held[name]) for name in scales if any(f".{part}_proj." in name for part in parts))
            assert float(experts.get_buffer(f"{matrix}_x_scale")) == pytest.approx(largest)


def test_gate_and_up_of_several_widths_have_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And scales of several types, of which float16 does not hold all."""
    scheme, pack = FORMATS["gptq"]
    monkeypatch.setitem(FORMATS, "mixed", (scheme | {"dynamic": {r"+:.*\.up_proj": {"bits": 8}}}, pack))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "mixed")
    held = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in held if name.endswith("up_proj.qweight")]:
        module, (groups, rows) = name.removesuffix(".qweight"), held[name.replace("qweight", "scales")].shape
        held[name] = words(torch.randint(0, 256, (rows, groups * 32), generator=generator), 8).T.contiguous()
        held[f"{module}.qzeros"] = words(torch.full((groups, rows), 127), 8)
        held[f"{module}.scales"] = torch.rand(groups, rows, generator=generator) * 1e-3
    save_file(held, tmp_path / "model.safetensors")
    (model, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    same_experts(model, floats, CodedExperts)
    assert any(one.value.startswith("int8, groups of 32 and int4, groups of 32") for one in report.decisions)


def test_experts_of_several_formats_become_floats_with_a_reason(tmp_path: Path) -> None:
    """An expert that the description leaves as floats."""
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "blocks")
    held = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    held[name] = held[name].float()
    del held[f"{name}_scale_inv"]
    save_file(held, tmp_path / "model.safetensors")
    model, report = loaded(hf_config, tmp_path, "stored")
    kinds = [type(one.method) is CodedExperts for one in model.modules() if isinstance(one, Experts)]
    assert kinds == [True, False]
    assert any("not all experts are stored as codes" in one.reason for one in report.decisions)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block"])
def test_floats_are_rounded_while_they_load(quantization: str, tmp_path: Path) -> None:
    sizes = {**SIZES, **QWEN, "num_key_value_heads": 4}
    hf_config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **sizes)
    save_file(tensors(hf_config), tmp_path / "model.safetensors")
    (held, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in (quantization, "none"))
    same_answers(held, floats, 0.1)
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    assert "rounded to FP8; relative error at most" in decision.reason
    assert all(0.01 < error < 0.04 for error in rounding_errors(held, floats))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block", "int8"])
def test_new_values_are_rounded_as_loading_rounds_them(quantization: str, tmp_path: Path) -> None:
    """New values are written into the memory of the old ones, which captured graphs read."""
    hf_config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **{**SIZES, **QWEN, "num_key_value_heads": 4})
    old = tensors(hf_config)
    new = {name: one.flip(0) if "_proj" in name else one for name, one in old.items()}
    models = []
    for weights in (old, new):
        save_file({name: one.contiguous() for name, one in weights.items()}, tmp_path / "model.safetensors")
        models.append(loaded(hf_config, tmp_path, quantization)[0])
    before = {name: buffer.data_ptr() for name, buffer in models[0].named_buffers()}
    for weights in (new, old, new):
        assert weight_update(models[0], weights).write() == len(weights)
    assert {name: buffer.data_ptr() for name, buffer in models[0].named_buffers()} == before
    for (name, ours), (_, theirs) in zip(models[0].named_buffers(), models[1].named_buffers(), strict=True):
        assert torch.equal(*(one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one for one in (ours, theirs))), (
            name
        )


@pytest.mark.parametrize(("name", "kept"), [("blocks", True), ("gptq", False)])
def test_new_values_of_kept_codes(name: str, kept: bool, tmp_path: Path) -> None:
    """Those in FP8 are rounded to the checkpoint's tiles; others are refused before anything is written."""
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, name)
    model, _ = loaded(hf_config, tmp_path, "stored")
    new = {full: one for full, one in tensors(hf_config).items() if ".experts." in full}
    if not kept:
        with pytest.raises(ConfigError, match="kept as int4, groups of 32, to which new values are not rounded") as caught:
            weight_update(model, new)
        assert caught.value.param == "quantization"
        return
    weight_update(model, new).write()
    experts = model.get_submodule("layers.0.mlp.experts")
    assert isinstance(experts, Experts)
    meant = torch.stack([new[f"model.layers.0.mlp.experts.{each}.down_proj.weight"] for each in range(4)])
    assert 0 < (experts.method.dequantize(experts, "down_proj") - meant).norm() / meant.norm() < 0.04


@pytest.mark.parametrize("name", ["blocks", "gptq", "w4afp8", "mxfp4"])
def test_codes_of_files_are_read_again(name: str, tmp_path: Path) -> None:
    """Experts that were dropped have their codes again, and the matrices beside them, bit for bit; on a rank its own part."""
    hf_config = saved_gpt_oss(tmp_path) if name == "mxfp4" else saved(tmp_path, Qwen3MoeConfig, QWEN, name)
    model, _ = loaded(hf_config, tmp_path, "stored", 1, tensor=2)
    assert bool(from_files(model)) == (name != "blocks")
    read_again(model, hf_config, tmp_path)


FP8_INPUTS: dict[str, Any] = {"activations": "token", "activation_codes": "e4m3"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec(codes="int4", group=(1, 24)), "groups of 24 inputs share a scale: kernels here take multiples of 16"),
        (QuantSpec(codes="int8", group=(16, 32)), "tiles of 16 outputs share a scale"),
        (QuantSpec(codes="int8", group=(1, 32), **FP8_INPUTS), "int8, groups of 32, for e4m3 activations (token)"),
        (QuantSpec(codes="int4", group=(1, 96), **FP8_INPUTS), "int4, groups of 96, for e4m3 activations (token)"),
        (QuantSpec(codes="int4", group=(1, 64), zero="min", **FP8_INPUTS), "groups of 64, minima, for e4m3 activations"),
        (
            QuantSpec(codes="e4m3", group=(1, 96)),
            "groups of 96 inputs share a scale: kernels of FP8 take powers of two from 32 on",
        ),
    ],
    ids=str,
)
def test_combinations_that_no_kernel_takes_are_named(spec: QuantSpec, reason: str) -> None:
    assert reason in why_not(spec)


@pytest.mark.parametrize(("groups", "more"), [((64, 192), FP8_INPUTS), ((48, 64), {})], ids=["activations", "groups"])
def test_integers_of_one_matrix_that_no_format_holds(groups: tuple[int, int], more: dict[str, Any]) -> None:
    assert "different number formats" in why_not(*(QuantSpec(codes="int4", group=(1, group), **more) for group in groups))


def why_not(*specs: QuantSpec) -> str:
    parts = [StoredMatrix("x", lambda: torch.zeros(0), read_spec=partial(copy.copy, spec)) for spec in specs]
    experts = MoeSpec(num_experts=2, top_k=1, intermediate_size=192)
    facts = ExpertsFacts(hidden_size=192, spec=experts, device="cuda", stored={"down_proj": parts})
    (why,) = KeepExperts().misfits(facts)
    return why
