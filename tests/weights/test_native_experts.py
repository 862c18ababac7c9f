"""Experts that are packed for the CPU's kernels hold what is stored, and say what their floats say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from headrace import LLM, SamplingParams
from headrace.core.commands import Checksums
from headrace.errors import ConfigError, WeightsError
from headrace.kernels.native import load
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.layers.stored import QuantSpec, StoredMatrix
from headrace.model_spec import MoeSpec
from headrace.quant.experts import ExpertsFacts
from headrace.quant.native import NativeMethod
from headrace.quant.native_experts import KeepNativeExperts, NativeExperts

from .experts import (
    ACT_ORDER,
    FORMATS,
    QWEN,
    SIZES,
    Packed,
    gptq,
    loaded,
    ordered,
    read_again,
    rounding_errors,
    same_answers,
    same_experts,
    saved,
)
from .models import tensors


@pytest.fixture(autouse=True)
def need_native() -> None:
    found = load()
    if found is None or found.tile == "portable":
        pytest.skip("no native products here")


def test_inputs_in_another_order_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts have inputs in another order. Gate and up of an expert have the same inputs, in one order."""
    calls = iter(range(1000))

    def some(weight: torch.Tensor) -> Packed:
        return ordered(weight) if next(calls) // 3 % 2 else gptq(weight)

    monkeypatch.setitem(FORMATS, "some", (ACT_ORDER, some))
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "some")
    (held, _), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    assert any("order" in name for one in same_experts(held, floats, NativeExperts) for name, _ in one.named_buffers())
    same_answers(held, floats, 1e-3)
    read_again(held, hf_config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.g_idx"
    stored[name] = stored[name].roll(32)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="gate and up of expert 1 have inputs in different orders"):
        loaded(hf_config, tmp_path, "stored")


def test_scales_that_half_precision_does_not_hold(tmp_path: Path) -> None:
    """All of a matrix are in float32 from the first of them on."""
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "packed")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    stored[name] = stored[name].float() * (1 + 2**-14)
    save_file(stored, tmp_path / "model.safetensors")
    (held, _), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("stored", "none"))
    first, second = same_experts(held, floats, NativeExperts)
    same_answers(held, floats, 1e-3)
    assert first.get_buffer("down_proj_packed").nbytes == second.get_buffer("down_proj_packed").nbytes // 5 * 6


@pytest.mark.parametrize(("quantization", "bound"), [("int4", 0.12), ("int8", 0.01)])
def test_floats_are_rounded_while_they_load(quantization: str, bound: float, tmp_path: Path) -> None:
    hf_config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **{**SIZES, **QWEN})
    save_file(tensors(hf_config), tmp_path / "model.safetensors")
    (held, report), (floats, _) = (loaded(hf_config, tmp_path, how) for how in (quantization, "none"))
    same_answers(held, floats, 2 * bound)
    bits = quantization.removeprefix("int")
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    assert f"rounded to {bits} bits; relative error at most" in decision.reason
    assert all(bound / 40 < error < bound for error in rounding_errors(held, floats))


def test_int4_keeps_what_is_stored_with_fewer_bits_than_floats(tmp_path: Path) -> None:
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "awq")
    (held, _), (floats, _) = (loaded(hf_config, tmp_path, how) for how in ("int8", "none"))
    same_experts(held, floats, NativeExperts)
    assert all(isinstance(one.method, NativeMethod) for one in held.modules() if isinstance(one, Linear))


def test_experts_of_several_kinds_of_codes_are_not_kept() -> None:
    specs = QuantSpec(codes="e4m3", group="channel"), QuantSpec(codes="int4", group=(1, 32))
    stored = {"gate_up_proj": [StoredMatrix("x", lambda: torch.zeros(0), read_spec=lambda spec=spec: spec) for spec in specs]}
    experts = MoeSpec(num_experts=1, top_k=1, intermediate_size=64)
    facts = ExpertsFacts(hidden_size=64, spec=experts, device="cpu", stored=stored)
    assert KeepNativeExperts().misfits(facts) == ["the experts' parts of gate_up_proj have different number formats"]


def test_sizes_that_groups_do_not_divide_stay_floats(tmp_path: Path) -> None:
    hf_config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **{**SIZES, **QWEN, "moe_intermediate_size": 48})
    save_file(tensors(hf_config), tmp_path / "model.safetensors")
    held, report = loaded(hf_config, tmp_path, "int8")
    assert all(not isinstance(one.method, NativeExperts) for one in held.modules() if isinstance(one, Experts))
    assert any("48 inputs are not a multiple of 32" in one.reason for one in report.decisions)


def test_experts_that_only_files_write(tmp_path: Path) -> None:
    """After level 2, codes to which no floats are rounded are whole once they are read again, and not by floats alone."""
    hf_config = saved(tmp_path, Qwen3MoeConfig, QWEN, "gptq")
    hf_config.save_pretrained(tmp_path)
    args: dict[str, Any] = {"num_kv_blocks": 40, "num_threads": 1, "max_step_seconds": 0, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), device="cpu", dtype="bfloat16", **args) as llm:

        def answer() -> list[int]:
            llm.reset_prefix_cache()
            return list(llm.generate({"prompt_token_ids": [*range(40, 70)]}, params)[0].outputs[0].token_ids)

        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        before = answer()
        name = "model.layers.0.mlp.experts.0.down_proj.weight"
        reply = llm._engine.executor.weights(Checksums())
        assert f"{name}#packed" in reply.checksums and name not in reply.checksums
        new = tensors(hf_config)[name]
        with pytest.raises(
            ConfigError, match=f"{name} is of experts that are kept as .* load the model with quantization none"
        ):
            llm.update_weights({name: new})
        assert answer() == before
        llm.sleep(2)
        llm.wake_up()
        floats = {name: one for name, one in load_file(tmp_path / "model.safetensors").items() if ".experts." not in name}
        with pytest.raises(WeightsError, match=r"dropped.*tensors were not written: .*experts\.0"):
            llm.update_weights(floats)
        llm.reload_weights()
        assert answer() == before
        (tmp_path / "model.safetensors").rename(tmp_path / "gone")
        with pytest.raises(WeightsError, match="only the model's files write would be lost"):
            llm.sleep(2)
        assert answer() == before
