"""``quantization_config`` decides the format of every matrix by its name, or is refused with what would do instead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.layers.stored import QuantSpec
from headrace.quant.formats.find import find_scheme
from headrace.quant.formats.scheme import Scheme

LAYER = "model.layers.1."
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def scheme(values: dict[str, Any]) -> Scheme:
    found = find_scheme(SimpleNamespace(quantization_config=values))
    assert found is not None
    return found


def spec(values: dict[str, Any], module: str = LAYER + "mlp.up_proj") -> QuantSpec | None:
    format_ = scheme(values).rule(module).format
    return None if format_ is None else format_.spec


def floats(values: dict[str, Any]) -> list[str]:
    """Those of some matrices that are stored as floats."""
    found = scheme(values)
    names = [LAYER + name for name in PROJECTIONS] + ["model.layers.10.mlp.up_proj", "lm_head"]
    return [name.removeprefix(LAYER) for name in names if found.rule(name).format is None]


def test_models_of_floats_have_no_scheme() -> None:
    assert find_scheme(SimpleNamespace()) is None
    assert find_scheme(SimpleNamespace(quantization_config=None, text_config=SimpleNamespace())) is None


def test_the_text_part_may_say_it() -> None:
    text = SimpleNamespace(quantization_config={"quant_method": "mxfp4"})
    found = find_scheme(SimpleNamespace(text_config=text))
    assert found is not None
    assert found.method == "mxfp4"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            QuantSpec(codes="e4m3", group=(128, 128), activations="group128", activation_codes="e4m3"),
        ),
        ({"quant_method": "fp8"}, QuantSpec(codes="e4m3", group="tensor", activations="token", activation_codes="e4m3")),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3", "scale_fmt": "ue8m0"},
            QuantSpec(codes="e4m3", group="tensor", activations="static", activation_codes="e4m3"),
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            QuantSpec(codes="e4m3", group="channel", activations="token", activation_codes="e4m3"),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            QuantSpec(codes="e4m3", group="tensor", activations="static", activation_codes="e4m3"),
        ),
        (
            {"quant_method": "modelopt", "producer": {}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
            QuantSpec(codes="nvfp4", group=(1, 16), scale="e4m3", activation_codes="fp4"),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}},
            QuantSpec(codes="int4", group=(1, 128)),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "naive-quantized",
                "config_groups": {
                    "a": {
                        "targets": ["Linear"],
                        "weights": FP8 | {"strategy": "block", "block_structure": "64x128"},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "dynamic": True},
                    }
                },
            },
            QuantSpec(codes="e4m3", group=(64, 128), activations="group128", activation_codes="e4m3"),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
            QuantSpec(codes="int4", group="channel", order="g_idx"),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
            QuantSpec(codes="int8", group=(1, 64), zero="int", order="g_idx"),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
            QuantSpec(codes="int4", group=(1, 128), zero="int"),
        ),
        ({"quant_method": "mxfp4"}, QuantSpec(codes="mxfp4", group=(1, 32), scale="e8m0")),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 128, "sym": True},
            QuantSpec(codes="int4", group=(1, 128), zero="int"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": INT4 | {"actorder": "group"}}},
            },
            QuantSpec(codes="int4", group=(1, 128), order="g_idx"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": FP8, "input_activations": FP8 | {"dynamic": False}}},
            },
            QuantSpec(codes="e4m3", group="channel", activations="static", activation_codes="e4m3"),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
            QuantSpec(codes="e4m3", group=(128, 128)),
        ),
    ],
    ids=str,
)
def test_what_is_read(values: dict[str, Any], expected: QuantSpec) -> None:
    assert spec(values) == expected


def test_experts_of_w4afp8_have_4_bits() -> None:
    values = {"quant_method": "w4afp8"}
    experts = QuantSpec(codes="int4", group=(1, 128), activations="static", activation_codes="e4m3")
    tiles = QuantSpec(codes="e4m3", group=(128, 128), activations="group128", activation_codes="e4m3")
    assert spec(values, LAYER + "mlp.experts.7.gate_proj") == experts
    assert spec(values, LAYER + "mlp.shared_experts.gate_proj") == tiles
    assert spec(values, LAYER + "self_attn.o_proj") == tiles


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.1", list(PROJECTIONS)),
        ("model.layers.1.mlp", ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        ("model.layers.*.mlp.up_proj", ["mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        ("mlp.gate", []),
        ("q_proj", ["self_attn.q_proj"]),
        ("qkv_proj", ["self_attn.q_proj", "self_attn.k_proj"]),
        (LAYER + "mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        (r"re:.*gate_up_proj", ["mlp.gate_proj", "mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        (r"re:.*up_proj$", ["mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        ("*up_proj", ["mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        (r"re:.*layers\.1\..*_proj", list(PROJECTIONS)),
        (r"re:layers\.1", []),
        (r".*\.(q|k)_proj", ["self_attn.q_proj", "self_attn.k_proj"]),
        ("layers.1.", list(PROJECTIONS)),
    ],
)
@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("fp8", "modules_to_not_convert"),
        ("fp8", "ignored_layers"),
        ("compressed-tensors", "ignore"),
        ("awq", "modules_to_not_convert"),
        ("modelopt", "exclude_modules"),
    ],
)
def test_patterns_of_matrices_that_are_floats(method: str, field: str, pattern: str, expected: list[str]) -> None:
    """They name whole components of a module's name, also of the module that other engines fuse it into."""
    values: dict[str, Any] = {"quant_method": method, field: [pattern]}
    values |= {
        "compressed-tensors": {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}},
        "awq": {"bits": 4, "group_size": 128},
        "modelopt": {"quant_algo": "FP8"},
    }.get(method, {})
    assert floats(values) == expected
    if expected:
        module = expected[0] if expected[0].startswith(("lm_head", "model")) else LAYER + expected[0]
        assert str(scheme(values).rule(module)) == f"{field} {pattern!r}"


def test_dynamic_patterns_of_gptq() -> None:
    """The first one that matches from the beginning of the name decides; the output head is quantised where it is said."""
    values = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "dynamic": {
            r"-:.*\.down_proj": {},
            r"+:.*\.layers\.1\..*up_proj": {"bits": 8, "group_size": 32},
            r".*k_proj": {"sym": False},
            r"up_proj": {"bits": 8},
        },
    }
    assert floats(values) == ["mlp.down_proj", "lm_head"]
    assert floats(values | {"lm_head": True}) == ["mlp.down_proj"]
    usual = QuantSpec(codes="int4", group=(1, 128), order="g_idx")
    assert spec(values) == QuantSpec(codes="int8", group=(1, 32), order="g_idx")
    assert spec(values, LAYER + "self_attn.k_proj") == QuantSpec(codes="int4", group=(1, 128), order="g_idx", zero="int")
    assert spec(values, "model.layers.10.mlp.up_proj") == usual
    assert spec(values, LAYER + "self_attn.q_proj") == usual


def test_extra_config_of_auto_round() -> None:
    values = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "extra_config": {"lm_head": {"bits": 16}, LAYER + "mlp.up_proj": {"bits": 8}},
    }
    assert floats(values) == ["lm_head"]
    assert spec(values) == QuantSpec(codes="int8", group=(1, 128), order="g_idx")


def test_targets_of_groups() -> None:
    """Names decide before patterns, and patterns before classes."""
    values = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "classes": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"},
            "patterns": {"targets": ["re:.*proj"], "weights": INT4, "format": "pack-quantized"},
            "names": {"targets": [LAYER + "mlp.down_proj"], "weights": INT4 | {"num_bits": 8}, "format": "pack-quantized"},
            "cache": {"targets": ["LlamaAttention"], "weights": None},
        },
    }
    assert spec(values, LAYER + "mlp.down_proj") == QuantSpec(codes="int8", group=(1, 128))
    assert spec(values) == QuantSpec(codes="int4", group=(1, 128))
    assert spec(values, "lm_head") == QuantSpec(codes="e4m3", group="channel")
    # Of classes in several formats, Linear is the one that can be told from a checkpoint.
    embeddings = {"embeddings": {"targets": ["Embedding"], "weights": INT4, "format": "pack-quantized"}}
    assert spec(values | {"ignore": [LAYER + "mlp.down_proj"]}, LAYER + "mlp.down_proj") is None
    assert spec(values | {"config_groups": embeddings | values["config_groups"]}, "lm_head") == spec(values, "lm_head")
    del values["config_groups"]["classes"]
    assert str(scheme(values).rule("lm_head")) == "no pattern of compressed-tensors names it"


def group(**changes: Any) -> dict[str, Any]:
    one = {"targets": ["Linear"], "weights": INT4} | changes
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": one}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("gptq", "quantization_config is 'gptq': it must be an object"),
        ({}, "quant_method None is not supported: supported are: fp8, "),
        ({"quant_method": "new"}, "quant_method 'new' is not supported: supported are: fp8, "),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\] is not supported"),
        ({"quant_method": "torchao"}, "tensor subclasses are not read: save the checkpoint as compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "4-bit tables .* serve the original with quantization int8"),
        ({"quant_method": "quark"}, "export the checkpoint as compressed-tensors or fp8"),
        ({"quant_method": "aqlm"}, "codebooks"),
        ({"quant_method": "hqq"}, "quantise the original checkpoint again"),
        ({"quant_method": "eetq"}, "quantise the original checkpoint again"),
        ({"quant_method": "vptq"}, "codebooks"),
        ({"quant_method": "bitnet"}, "GGUF"),
        ({"quant_method": "w4a8"}, "not documented"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"\(fp8\): fmt 'e5m2' is not supported; supported are: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] .* two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "two positive integers"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme 'block' .* dynamic, static"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "it must be a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, r"has '\(', which is no regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' .* FP8, .* save the checkpoint as"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}},
            r"quantization\.quant_algo 'MIXED_PRECISION'",
        ),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported are: 4, 8"),
        (GPTQ | {"bits": None}, "bits None"),
        (GPTQ | {"bits": "4"}, "bits '4'"),
        (GPTQ | {"group_size": 0}, "group_size 0 .* positive integer"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, r"dynamic\.\+:\.\*\.bits 2"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "no regular expression"),
        (GPTQ | {"dynamic": []}, r"dynamic \[\] is not supported; it must be an object"),
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "symmetric matrices are read from checkpoints of gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4}, "packing_format 'auto_round'"),
        (
            group() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config\.format 'sparse-24-bitmask' .* 2:4 sparse",
        ),
        (group() | {"transform_config": {"config_groups": {"u": {}}}}, "rotations would have to run with the model"),
        (group(output_activations={"num_bits": 8}), r"config_groups\.g\.output_activations .* outputs are not rounded"),
        (group(weights=INT4 | {"num_bits": 3}), r"config_groups\.g\.weights\.num_bits 3 .* integers of 4 and 8 bits"),
        (group(weights=INT4 | {"strategy": "attn_head"}), "strategy 'attn_head'"),
        (group(weights=FP8), "pack-quantized has integers"),
        (group(format="marlin-24"), "format 'marlin-24' .* supported are: pack-quantized"),
        (group(weights=[]), "it must be an object"),
        (
            group(
                format="mxfp4-pack-quantized", weights={"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
            ),
            "mxfp4 groups of 32",
        ),
    ],
    ids=str,
)
def test_what_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_scheme(SimpleNamespace(quantization_config=values))
    assert caught.value.param == "quantization_config"


COMPLETE: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "ue8m0", "ignored_layers": ["a"]},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["a*"]}},
    {"quant_method": "w4afp8", "weight_block_size": [128, 128], "group_size": 128},
    GPTQ | {"sym": True, "lm_head": True, "checkpoint_format": "gptq", "dynamic": {"+:a": {"bits": 8}}},
    AWQ | {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["a"]},
    {
        "quant_method": "auto-round",
        "packing_format": "auto_gptq",
        "bits": 4,
        "group_size": 1,
        "extra_config": {"a": {"bits": 8}},
    },
    group(input_activations={"num_bits": 8, "type": "float", "strategy": "group", "dynamic": True}, output_activations=None)
    | {"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}, "ignore": ["a"]},
    group(weights=FP8 | {"strategy": "block", "block_structure": "1x2", "actorder": None}, format="float-quantized"),
]
ODD: list[Any] = [None, True, False, -1, 0, 2**70, 1.5, float("nan"), "", "re:(", "x" * 100, [], [[]], [None], {}, {"a": {}}]


def variants(value: Any) -> Iterator[Any]:
    """Copies of a value in which each value within, or it as a whole, is an odd one."""
    yield from ODD
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for other in variants(inner):
            changed = copy.copy(value)
            changed[key] = other
            yield changed


@pytest.mark.parametrize("values", COMPLETE, ids=lambda values: values["quant_method"])
def test_odd_values_are_read_or_refused(values: dict[str, Any]) -> None:
    assert spec(values) is not None
    refused = 0
    for changed in variants(values):
        try:
            found = find_scheme(SimpleNamespace(quantization_config=changed))
        except ConfigError as error:
            assert error.param == "quantization_config"
            refused += 1
        else:
            assert found is None or found.rule("lm_head") is not None
    assert refused > 20


def test_a_scheme_shows_its_formats() -> None:
    assert str(scheme(GPTQ)) == "gptq: int4, groups of 128"
    assert str(scheme({"quant_method": "fp8", "weight_block_size": [128, 128]})) == (
        "fp8: e4m3, tiles of 128 x 128, for e4m3 activations (group128)"
    )
    assert (
        str(scheme({"quant_method": "fbgemm_fp8"}))
        == "fbgemm_fp8: e4m3, a scale for each channel, for e4m3 activations (token)"
    )
