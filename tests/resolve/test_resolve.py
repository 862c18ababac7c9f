"""Arguments, model and device to a configuration: what is chosen, why, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.resolving import MIB, ZEN, decide, model

from headrace.config import EngineArgs, EngineConfig
from headrace.errors import ConfigError, MemoryConfigError
from headrace.kernels import support
from headrace.kv import KVCacheManager
from headrace.model_spec import ModelSpec, RopeSpec, VisionSpec
from headrace.models.size import weight_bytes
from headrace.resolve import DeviceFacts

NATIVE = dataclasses.replace(ZEN, native_kernels="avx512_vnni")
OLD = dataclasses.replace(ZEN, instructions=frozenset({"avx2"}))
OLD_NATIVE = dataclasses.replace(OLD, native_kernels="avx2")


def reason(config: EngineConfig, name: str) -> str:
    return next(decision.reason for decision in config.decisions if decision.name == name)


@pytest.mark.parametrize(
    ("args", "types", "checkpoint", "device", "dtype", "quantization"),
    [
        ({}, None, "bfloat16", ZEN, "bfloat16", "none"),
        ({}, None, "float16", ZEN, "float32", "none"),
        ({}, None, "float32", ZEN, "float32", "none"),
        ({}, None, "bfloat16", OLD, "float32", "none"),
        ({}, ("Q4_1",), "float32", ZEN, "bfloat16", "int4"),
        ({}, ("Q4_0", "Q4_K"), "float32", ZEN, "bfloat16", "int4"),
        ({}, ("Q4_K", "Q6_K"), "float32", ZEN, "bfloat16", "none"),
        ({}, ("Q8_0",), "float32", ZEN, "bfloat16", "none"),
        ({}, ("Q4_1",), "float32", OLD, "float32", "none"),
        ({}, ("F16",), "float16", ZEN, "float32", "none"),
        ({"dtype": "float32"}, ("Q4_1",), "float32", ZEN, "float32", "none"),
        ({"quantization": "none"}, ("Q4_1",), "float32", ZEN, "bfloat16", "none"),
        ({"quantization": "int4"}, None, "float32", OLD, "bfloat16", "int4"),
        ({"quantization": "int8"}, None, "bfloat16", ZEN, "bfloat16", "int8"),
        ({"dtype": "bfloat16"}, None, "float32", OLD, "bfloat16", "none"),
        ({}, ("Q8_0",), "float32", NATIVE, "bfloat16", "int8"),
        ({}, ("Q4_1",), "float32", OLD_NATIVE, "float32", "int4"),
        ({"dtype": "float32"}, ("Q4_1",), "float32", OLD_NATIVE, "float32", "none"),
        ({"dtype": "float32", "quantization": "int4"}, ("Q4_1",), "float32", NATIVE, "float32", "int4"),
        ({"dtype": "float16", "quantization": "int8"}, None, "float16", NATIVE, "float16", "int8"),
        ({}, ("Q4_K", "Q5_K", "Q8_0"), "float32", NATIVE, "bfloat16", "int4"),
        ({}, ("Q4_K", "Q6_K"), "float32", NATIVE, "bfloat16", "none"),
    ],
)
def test_numbers(args: dict, types: tuple | None, checkpoint: str, device: DeviceFacts, dtype: str, quantization: str) -> None:
    config = decide(model(dtype=checkpoint), device, types, **args)
    assert (config.dtype, config.quantization, config.cache.dtype) == (dtype, quantization, dtype)
    if "dtype" not in args:
        assert reason(config, "dtype")
    if "quantization" not in args:
        assert reason(config, "quantization")


def test_int4_needs_matrices_that_its_kernel_holds() -> None:
    assert decide(model(hidden=72), types=("Q4_1",)).quantization == "none"
    assert "multiple" in reason(decide(model(hidden=72), types=("Q4_1",)), "quantization")
    assert decide(model(hidden=72), NATIVE, ("Q4_1",)).quantization == "none"
    with pytest.raises(ConfigError, match="multiple") as caught:
        decide(model(hidden=72), quantization="int4")
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("name", ["trust_remote_code", "enable_prefix_caching", "deterministic", "enforce_eager"])
@pytest.mark.parametrize("value", ["false", "no", 0, 1, None])
def test_switches_are_on_or_off(name: str, value: Any) -> None:
    """Nothing of a checkpoint is read before: code that comes with one least of all."""
    with pytest.raises(ConfigError, match=f"{name} must be True or False, not {value!r}") as caught:
        EngineArgs(**{name: value})
    assert caught.value.param == name


def test_longrope_has_one_set_of_factors_for_all_sequences() -> None:
    plain = model(context=64)
    lengths = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    rope = RopeSpec(1e4, "longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **lengths})
    spec = dataclasses.replace(plain, layers=tuple(dataclasses.replace(layer, rope=rope) for layer in plain.layers))
    for asked, longest, is_long in ((None, 64, False), ("auto", 64, False), (64, 64, False), (65, 65, True), (256, 256, True)):
        config = decide(spec, max_model_len=asked)
        assert config.scheduler.max_model_len == longest
        assert {layer.rope.long_factors for layer in config.model.layers if layer.rope is not None} == {is_long}
        assert "beyond 64" in reason(config, "rotary embedding")
        again = decide(config.model, max_model_len=asked)
        assert (again.model, again.decisions) == (config.model, config.decisions)
    with pytest.raises(
        ConfigError, match=r"^max_model_len 257 is longer than the model's context of 256 tokens: beyond it, longrope"
    ):
        decide(spec, max_model_len=257)
    with pytest.raises(ConfigError, match=r"^max_model_len \d+ is longer than the model's context of \d+ tokens$"):
        decide(plain, max_model_len=plain.max_position + 1)
    assert not any(decision.name == "rotary embedding" for decision in decide(plain).decisions)


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "fp8"}, "quantization"),
        ({"policy": "lifo"}, "policy"),
        ({"dtype": "float32", "quantization": "int4"}, "quantization"),
        ({"dtype": "float16", "quantization": "int8"}, "quantization"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 16.0}, "block_size"),
        ({"block_size": 5000}, "block_size"),
        ({"pipeline_depth": 0}, "pipeline_depth"),
        ({"seed": -1}, "seed"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 10**9}, "num_threads"),
        ({"step_timeout": 0}, "step_timeout"),
        ({"start_timeout": 0}, "start_timeout"),
        ({"start_timeout": 10**400}, "start_timeout"),
        ({"quarantine_seconds": -1}, "quarantine_seconds"),
        ({"max_queue_len": 0}, "max_queue_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 10**9}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": "all"}, "max_model_len"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"num_kv_blocks": 5, "kv_cache_memory": 5}, "num_kv_blocks"),
        ({"num_kv_blocks": 31, "max_model_len": 512}, "num_kv_blocks"),
        ({"kv_cache_memory": 10_000, "max_model_len": 512}, "kv_cache_memory"),
        ({"num_kv_blocks": 1, "block_size": 1}, "num_kv_blocks"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory"),
        ({"max_num_seqs": 65_537}, "max_num_seqs"),
        ({"max_model_len": "auto", "kv_cache_memory": 1000}, "max_model_len"),
        ({"attention_backend": "abacus"}, "attention_backend"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch"}, "attention_backend"),
    ],
)
def test_refusals_name_the_parameter(args: dict, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(**args)
    assert caught.value.param == param


def test_an_fp8_cache_holds_more_tokens_in_the_same_bytes() -> None:
    plain, small = (
        decide(model(windows=(None, 48)), kv_cache_memory=MIB, max_num_seqs=8, kv_cache_dtype=kind, dtype="bfloat16")
        for kind in ("auto", "fp8_e4m3")
    )
    assert (plain.dtype, plain.cache.dtype) == ("bfloat16", "bfloat16")
    assert (small.dtype, small.cache.dtype) == ("bfloat16", "fp8_e4m3")
    # 2 heads of K and V, 16 wide; in FP8 a byte each, and two scales of 4 bytes a head.
    assert [group.bytes_per_token for group in plain.cache.groups] == [128, 128]
    assert [group.bytes_per_token for group in small.cache.groups] == [80, 80]
    assert small.cache.nbytes <= MIB and small.cache.num_blocks[0] == MIB // (16 * 80)
    assert set(small.attention_backends) == {"reference"}
    assert "no per-token-head scales" in reason(small, "attention_backend")


def test_what_an_fp8_cache_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="block_size") as caught:
        decide(block_size=1, kv_cache_dtype="fp8_e4m3", spec=odd())
    assert caught.value.param == "block_size"
    monkeypatch.setattr(support, "compute_capability", lambda device: 75)
    with pytest.raises(ConfigError, match=r"FP8 KV cache requires SM80\+, got SM75") as caught:
        decide(kv_cache_dtype="fp8_e4m3", device=dataclasses.replace(ZEN, device="cuda"))
    assert caught.value.param == "kv_cache_dtype"


def odd() -> ModelSpec:
    """Heads of 5 numbers."""
    spec = model()
    layers = tuple(dataclasses.replace(layer, head_dim=5, v_head_dim=5, rotary_dim=0) for layer in spec.layers)
    return dataclasses.replace(spec, layers=layers)


def test_a_batch_holds_a_token_of_every_sequence() -> None:
    scheduler = decide().scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (64, 2048)
    assert decide(max_num_batched_tokens=20).scheduler.max_num_seqs == 20
    assert decide(max_num_seqs=3000).scheduler.max_num_batched_tokens == 3000


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        ({}, 2048),
        ({"max_num_batched_tokens": 300}, 512),
        ({"max_num_batched_tokens": 30_000}, 16_384),
        ({"max_num_encoder_tokens": 100}, 100),
        ({"mm_encoder": "none"}, 0),
    ],
)
def test_a_step_may_encode_as_many_tokens_as_it_computes(args: dict, tokens: int) -> None:
    spec = dataclasses.replace(model(), vision=VisionSpec(model_type="x"))
    assert decide(spec, **args).scheduler.max_num_encoder_tokens == tokens


def test_threads_are_the_cores_unless_given() -> None:
    assert decide().num_threads == 6
    assert decide(num_threads=9).num_threads == 9


def test_num_kv_blocks_are_those_that_hold_data() -> None:
    config = decide(num_kv_blocks=32)
    assert config.cache.num_blocks == (33,) and config.scheduler.max_model_len == 512
    assert decide(num_kv_blocks=10, max_model_len="auto").scheduler.max_model_len == 160
    with pytest.raises(ConfigError, match=r"num_kv_blocks to 32 or more, or max_model_len to 496"):
        decide(num_kv_blocks=31, max_model_len=512)


@pytest.mark.parametrize(("args", "length"), [({"num_kv_blocks": 10}, 160), ({"kv_cache_memory": 50_000}, 176)])
def test_the_length_follows_from_the_size_of_the_cache_unless_it_is_given(args: dict, length: int) -> None:
    config = decide(**args)
    assert config.scheduler.max_model_len == length
    assert "the longest that fits in" in reason(config, "max_model_len")
    with pytest.raises(ConfigError, match=f"max_model_len to {length} or less"):
        decide(**args, max_model_len=512)


@pytest.mark.parametrize("given", [{"kv_cache_memory": 100}, {"kv_cache_memory": 50_000, "max_model_len": 512}], ids=str)
def test_a_refusal_says_the_least_memory_that_works(given: dict) -> None:
    with pytest.raises(ConfigError, match=r"set kv_cache_memory to \d+ or more") as refused:
        decide(**given)
    least = int(str(refused.value).partition("kv_cache_memory to ")[2].split()[0])
    decide(**given | {"kv_cache_memory": least})
    with pytest.raises(ConfigError):
        decide(**given | {"kv_cache_memory": least - 1})


def test_slots_that_memory_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs 65,536 takes 136 MiB") as caught:
        decide(max_num_seqs=65_536, device=dataclasses.replace(ZEN, available_memory=100 * MIB))
    assert caught.value.param == "max_num_seqs"


def test_default_memory_is_what_could_be_used_but_modest() -> None:
    per_block = 16 * 2 * 2 * 32 * 2  # tokens, layers, K/V heads, widths of K and V, bytes
    roomy = decide(max_num_seqs=4, max_num_batched_tokens=64)
    assert roomy.cache.num_blocks == (4 * 32 + 1,) and "could use no more" in reason(roomy, "kv_cache_memory")
    tight = decide(device=dataclasses.replace(ZEN, available_memory=4 * MIB))
    assert tight.cache.nbytes <= MIB and "25%" in reason(tight, "kv_cache_memory")
    needy = decide(device=dataclasses.replace(ZEN, available_memory=33 * per_block * 2 + 300_000))
    assert needy.cache.num_blocks == (33,) and "one sequence" in reason(needy, "kv_cache_memory")
    with pytest.raises(ConfigError, match=r"max_model_len to .* or less, or to auto"):
        decide(device=dataclasses.replace(ZEN, available_memory=weight_bytes(model(), "bfloat16", "none", "cpu") + 100_000))
    with pytest.raises(ConfigError):
        decide(device=dataclasses.replace(ZEN, available_memory=0), max_model_len="auto")


def test_packed_weights_need_no_room_for_floats() -> None:
    """Unless kernels keep a copy of them."""
    floats = weight_bytes(model(), "bfloat16", "none", "cpu")
    small = dataclasses.replace(ZEN, available_memory=floats, native_kernels="avx512_vnni")
    assert decide(quantization="int4", device=small, max_model_len=32).quantization == "int4"
    amx = dataclasses.replace(small, instructions=ZEN.instructions | {"amx_tile"})
    for device in (amx, dataclasses.replace(small, native_kernels="")):
        with pytest.raises(MemoryConfigError, match="of weights, and"):
            decide(quantization="int4", device=device, max_model_len=32)


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
@given(
    windows=st.lists(st.sampled_from([None, 20, 64, 300]), min_size=1, max_size=4).map(tuple),
    memory=st.integers(1_000, 8 * MIB),
    block_size=st.sampled_from([1, 8, 16, 48]),
    length=st.sampled_from([None, "auto", 40, 512]),
    seqs=st.integers(1, 70),
)
def test_the_cache_stays_in_its_memory_and_holds_a_whole_sequence(
    windows: tuple, memory: int, block_size: int, length: Any, seqs: int
) -> None:
    spec = model(windows=windows)
    args = {"block_size": block_size, "max_model_len": length, "max_num_seqs": seqs}
    try:
        config = decide(spec, kv_cache_memory=memory, **args)
    except ConfigError as error:
        # What the message advises works.
        if length != 512:
            return
        needed = int(str(error).partition("kv_cache_memory to ")[2].split()[0])
        assert needed > memory
        assert decide(spec, kv_cache_memory=needed, **args).cache.nbytes <= needed
        return
    smallest = min(block_size * group.bytes_per_token for group in config.cache.groups)
    assert memory - smallest < config.cache.nbytes <= memory
    kv = KVCacheManager(config.cache)
    assert kv.too_small_for(config.scheduler.max_model_len, 1) is None
    if length in (None, "auto") and config.scheduler.max_model_len < 512:
        longer = {**args, "max_model_len": config.scheduler.max_model_len + 1}
        with pytest.raises(ConfigError):
            decide(spec, kv_cache_memory=memory, **longer)


def test_nothing_is_mutated() -> None:
    args = EngineArgs(max_model_len="auto", num_kv_blocks=10)
    config = decide(max_model_len="auto", num_kv_blocks=10)
    assert config.args == args == EngineArgs(max_model_len="auto", num_kv_blocks=10)


FOR_GPUS: dict[str, Any] = {
    "enforce_eager": True,
    "wait_for_kernels": True,
    "graph_capture_seconds": 3.0,
    "gpu_memory_utilization": 0.5,
}


@pytest.mark.parametrize("name", FOR_GPUS)
def test_what_is_for_gpus_alone_is_said_to_have_no_effect_on_a_cpu(name: str) -> None:
    decisions = {decision.name: decision for decision in decide(**{name: FOR_GPUS[name]}).decisions}
    assert set(FOR_GPUS) & set(decisions) == {name}, "of what was not asked for nothing is said"
    assert decisions[name].value == "no effect"
    assert decisions[name].reason.startswith(f"{FOR_GPUS[name]} was asked for, but ")
