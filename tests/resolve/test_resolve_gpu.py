"""Decisions for a GPU, from facts alone: no device is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.resolving import GIB, HOPPER, a_device, decide, model, on_gpu

from headrace.attention import select
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.model_spec import ForeignSpec, MoeSpec
from headrace.model_spec.model import ModelFacts
from headrace.models.size import weight_bytes
from headrace.resolve.memory import CUDA_SLACK
from headrace.resolve.schedule import DETERMINISTIC, MAX_GRAPH_ROWS
from headrace.startup.report import _layer_lines

from .test_resolve import FOR_GPUS

__all__ = ["a_device"]


def reasons(config: EngineConfig) -> dict[str, str]:
    return {decision.name: decision.reason for decision in config.decisions}


def test_all_memory_that_is_left_is_the_caches() -> None:
    config = on_gpu(gpu_memory_utilization=0.5)
    # 10 GiB are taken already, and half of the 80 stays free.
    room = 70 * GIB - 40 * GIB - CUDA_SLACK
    assert 0.99 * room < config.cache.nbytes <= room
    assert "gpu_memory_utilization" in reasons(config)["kv_cache_memory"]


def test_a_cache_of_a_given_size() -> None:
    assert 0.99 * GIB < on_gpu(kv_cache_memory=GIB).cache.nbytes <= GIB


@pytest.mark.parametrize("asked", [{"kv_cache_memory": 100 * 2**40}, {"num_kv_blocks": 10**11}], ids=str)
def test_more_cache_than_there_is_memory(asked: dict[str, int]) -> None:
    (name,) = asked
    for there in (HOPPER, None):
        with pytest.raises(ConfigError, match=f"{name} .*B, and .* are there beside the weights") as caught:
            decide(model(context=4096), *([] if there is None else [there]), **asked)
        assert caught.value.param == name


def test_steps_overlap_and_graphs_are_captured() -> None:
    config = on_gpu()
    assert config.scheduler.pipeline_depth == 2
    assert config.graph_rows[0] == 1 and config.graph_rows[-1] == config.scheduler.max_num_seqs == 256
    assert list(config.graph_rows) == sorted(set(config.graph_rows))
    assert config.graph_prompt_tokens[-1] <= config.scheduler.max_num_batched_tokens


@pytest.mark.parametrize(("seqs", "most"), [(1, 1), (3, 3), (64, 64), (700, 700), (5000, MAX_GRAPH_ROWS)])
def test_graphs_fit_the_batch(seqs: int, most: int) -> None:
    assert on_gpu(max_num_seqs=seqs).graph_rows[-1] == most


def test_eager_steps() -> None:
    config = on_gpu(enforce_eager=True)
    assert config.graph_rows == config.graph_prompt_tokens == ()


def test_prompts_of_large_models_are_no_graphs() -> None:
    large = model(hidden=2**22, context=4096)
    tokens = decide(large, HOPPER).graph_prompt_tokens
    assert len(tokens) < len(on_gpu().graph_prompt_tokens)


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")])
def test_dtype(stored: str, dtype: str) -> None:
    assert decide(model(dtype=stored), HOPPER).dtype == dtype


MXFP4 = {"quant_method": "mxfp4"}
MOE = MoeSpec(num_experts=4, top_k=2, intermediate_size=64)


@pytest.mark.parametrize(
    ("types", "chosen"),
    [
        (("Q4_1",), "stored_int4"),
        (("Q4_K", "Q6_K"), "stored"),
        (("Q8_0",), "stored"),
        (("Q2_K",), "stored"),
        (("F16",), "none"),
    ],
)
def test_integers_of_a_file_are_kept(types: tuple[str, ...], chosen: str) -> None:
    config = decide(model(), HOPPER, types=types)
    assert config.quantization == chosen
    assert config.dtype == "bfloat16"
    assert decide(dataclasses.replace(model(), mlps=(MOE, MOE)), HOPPER, types=types).quantization == chosen


@pytest.mark.parametrize("asked", ["int4", "int8"])
def test_integers(asked: str) -> None:
    assert on_gpu(quantization=asked).quantization == asked
    assert on_gpu(quantization=asked, deterministic=True).quantization == asked
    assert on_gpu(quantization=asked).cache.nbytes > on_gpu().cache.nbytes
    with pytest.raises(ConfigError, match="16-bit activations") as caught:
        on_gpu(quantization=asked, dtype="float32")
    assert caught.value.param == "dtype"


def test_estimates_count_experts_as_they_are_held() -> None:
    spec = dataclasses.replace(model(), mlps=(MOE, MOE))
    floats, int8, fp8, stored, stored_int4 = (
        weight_bytes(spec, "bfloat16", name, "cuda") for name in ("none", "int8", "fp8", "stored", "stored_int4")
    )
    # Integers are not rounded to for experts.
    assert stored_int4 < fp8 < stored < int8 < floats


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_block"])
def test_fp8_is_for_gpus_that_multiply_it(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(quantization=asked).quantization == on_gpu(quantization=asked, deterministic=True).quantization == asked
    with pytest.raises(ConfigError, match=asked) as caught:
        on_gpu(quantization=asked, dtype="float32")
    assert caught.value.param == "dtype"
    monkeypatch.setattr(support, "compute_capability", lambda _: 89)
    if asked == "fp8_per_block":
        with pytest.raises(ConfigError, match="in blocks on Hopper alone: write fp8"):
            on_gpu(quantization=asked)
        return
    assert on_gpu(quantization=asked).quantization == asked
    with pytest.raises(ConfigError, match="on Hopper alone") as caught:
        on_gpu(quantization=asked, deterministic=True)
    assert caught.value.param == "deterministic"


FOUR = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("quantised", "args", "chosen", "reason"),
    [
        (BLOCKS, {}, "stored", "which the GPU multiplies"),
        (BLOCKS, {"quantization": "none"}, "none", "dequantised to bfloat16"),
        (BLOCKS, {"quantization": "fp8"}, "stored", "which the GPU multiplies"),
        (BLOCKS, {"quantization": "fp8_per_channel"}, "stored", "which the GPU multiplies"),
        (BLOCKS, {"quantization": "fp8_per_block"}, "stored", "which the GPU multiplies"),
        (FOUR, {"quantization": "gptq_marlin"}, "stored_int4", "the checkpoint is of integers"),
        (FOUR, {"quantization": "int8"}, "int8", "packed as int8"),
        (FOUR, {"quantization": "none"}, "none", "dequantised to bfloat16"),
        (FOUR, {"dtype": "float32"}, "none", "weights are made float32"),
        (None, {"quantization": "fp8_per_channel"}, "fp8", ""),
        (BLOCKS, {"dtype": "float32"}, "none", "weights are made float32"),
        (BLOCKS, {"deterministic": True}, "stored", "which the GPU multiplies"),
        (FOUR, {}, "stored_int4", "the checkpoint is of integers"),
        ({**FOUR, "bits": 8}, {"deterministic": True}, "stored", "the checkpoint is of integers"),
        (MXFP4, {}, "stored", "the checkpoint is of integers, MXFP4 or NVFP4"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, {}, "stored", "which the GPU multiplies"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            {},
            "stored",
            "the checkpoint means FP8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": KV}, {}, "stored", "the checkpoint means FP8"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": PACKED}, "kv_cache_scheme": KV},
            {},
            "stored_int4",
            "the checkpoint means FP8",
        ),
    ],
)
def test_quantised_checkpoints_are_kept(
    quantised: dict[str, Any] | None, args: dict[str, Any], chosen: str, reason: str
) -> None:
    config = on_gpu(quantised=quantised, **args)
    assert config.quantization == chosen
    assert any(reason in why for why in reasons(config).values())


@pytest.mark.parametrize(
    ("quantised", "args", "chosen"),
    [
        *((one, args, "stored") for one in (BLOCKS, {"quant_method": "w4afp8"}) for args in ({}, {"deterministic": True})),
        *((one, args, "stored_int4") for one in (MXFP4, FOUR) for args in ({}, {"deterministic": True})),
        (MXFP4, {"quantization": "none"}, "none"),
        (MXFP4, {"dtype": "float32"}, "stored_int4"),
        ({**FOUR, "bits": 8}, {}, "stored"),
    ],
)
def test_experts_of_four_bits_are_kept(quantised: dict[str, Any], args: dict[str, Any], chosen: str) -> None:
    spec = dataclasses.replace(model(), mlps=(MOE, MOE))
    assert decide(spec, HOPPER, quantised=quantised, **args).quantization == chosen


@pytest.mark.parametrize(
    ("quantised", "asked", "found"),
    [
        (BLOCKS, "awq", "quantised as fp8: e4m3"),
        (FOUR, "awq_marlin", "quantised as gptq: int4"),
        (FOUR, "fp8", "quantised as gptq: int4"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_per_block", "quantised as fbgemm_fp8: e4m3"),
        (None, "gptq", "not quantised"),
        (None, "gguf", "not quantised"),
    ],
)
def test_a_format_that_the_checkpoint_has_not_is_refused(quantised: dict[str, Any] | None, asked: str, found: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization {asked}: the checkpoint is {found}") as caught:
        on_gpu(quantised=quantised, quantization=asked)
    assert caught.value.param == "quantization"


def test_the_head_may_be_quantised_alone() -> None:
    config = decide(dataclasses.replace(model(context=4096), vocab_size=256), HOPPER, quantize_head="fp8")
    assert config.quantization == "none" and reasons(config)["quantize_head"] == "asked for"
    assert "nothing is quantised" in reasons(on_gpu(quantization_ignore=("o_proj",)))["quantization_ignore"]
    for args, message in (
        ({"quantize_head": "int8", "dtype": "float32"}, "16-bit activations"),
        ({"quantize_head": "fp8"}, "300 outputs are not a multiple of 16"),
        ({"quantize_head": "fp8_per_block"}, "300 outputs are not a multiple of 16"),
    ):
        spec = model(context=4096) if "300" in message else dataclasses.replace(model(context=4096), vocab_size=256)
        with pytest.raises(ConfigError, match=message) as caught:
            decide(spec, HOPPER, **args)
        assert caught.value.param == "quantize_head"


def test_deterministic() -> None:
    assert set(on_gpu(deterministic=True).attention_backends) == {"invariant"}
    assert set(on_gpu(deterministic=True, attention_backend="invariant").attention_backends) == {"invariant"}
    config = on_gpu(deterministic=True)
    told = {(line.backend, line.reason) for line in _layer_lines(config)}
    assert told == {("invariant", DETERMINISTIC)} and DETERMINISTIC in reasons(config)["attention_backend"]


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "reference"])
def test_a_backend_that_is_not_deterministic(backend: str) -> None:
    with pytest.raises(ConfigError, match="depends on the batch") as caught:
        on_gpu(deterministic=True, attention_backend=backend)
    assert caught.value.param == "deterministic"


def test_a_foreign_model_is_not_deterministic() -> None:
    """Its products are where its own code has them."""
    own = model(context=4096)
    shared = {field.name: getattr(own, field.name) for field in dataclasses.fields(ModelFacts)}
    foreign = ForeignSpec(**shared, num_tokens=own.vocab_size, num_weights=1000)
    with pytest.raises(ConfigError, match="deterministic is for native models") as caught:
        decide(foreign, HOPPER, deterministic=True)
    assert caught.value.param == "deterministic"


def test_deterministic_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="deterministic is for GPUs") as caught:
        decide(deterministic=True)
    assert caught.value.param == "deterministic"


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True])
def test_a_share_that_is_none(share: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        on_gpu(gpu_memory_utilization=share)
    assert caught.value.param == "gpu_memory_utilization"


def test_invariant_attention_is_never_chosen_for_its_speed() -> None:
    names = select.names()
    assert names.index("invariant") > names.index("triton") > names.index("flashinfer+triton")


def test_what_is_for_gpus_has_an_effect_there() -> None:
    assert "no effect" not in {decision.value for decision in on_gpu(**FOR_GPUS).decisions}
