"""Types and ranges of what a model's files may say. A file's values are checked against them before anything is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headrace.errors import ConfigError
from headrace.options import INT32_MAX, check_value, options, shown
from headrace.sampling_params import SamplingParams

Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Width = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
"""Width of a vector, or a number of heads: a product of three of them is a number of bytes that 64 bits hold."""
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""A width that is not 0."""
Experts = Annotated[int, msgspec.Meta(ge=0, le=2**14)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)]
Length = Annotated[int, msgspec.Meta(ge=-1, le=2**40)]
"""Number of tokens; some models write a window of 0 or -1 for none."""
Positions = Annotated[int, msgspec.Meta(ge=2, le=2**40)]
Epsilon = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Factor = Annotated[float, msgspec.Meta(ge=2.0**-20, le=2.0**20)]
Divisor = Annotated[float, msgspec.Meta(gt=0.0, le=2.0**20)]
"""Logits are divided by it."""
Theta = Annotated[float, msgspec.Meta(gt=1.0, le=2.0**60)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

DType = Literal[
    "float64",
    "double",
    "float32",
    "float",
    "float16",
    "half",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "auto",
]

MAX_DEPTH = 64
"""Lists and objects within each other in a JSON file."""

_WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads"),
    *("num_global_key_value_heads", "hidden_size_per_layer_input"),
)
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts", "n_shared_experts"),
    *("moe_num_experts", "moe_k", "moe_num_shared_experts", "n_group", "topk_group"),
)
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_sliding_window", "norm_topk_prob")

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")

FIELDS: dict[str, Any] = {
    "model_type": str,
    "architectures": list[str],
    "text_config": dict[str, Any],
    "quantization_config": dict[str, Any],
    "rope_parameters": dict[str, Any],
    "rope_scaling": dict[str, Any],
    "auto_map": dict[str, Any],
    "torch_dtype": DType,
    "dtype": DType,
    "num_hidden_layers": Layers,
    "vocab_size": Vocabulary,
    "vocab_size_per_layer_input": Vocabulary,
    **dict.fromkeys(_SWITCHES, bool),
    **dict.fromkeys(("hidden_act", "hidden_activation"), str | list[str]),
    "layer_types": list[str | None],
    "mlp_layer_types": list[str],
    "mlp_only_layers": list[int],
    "decoder_sparse_step": Width,
    "max_window_layers": Width,
    "sliding_window": Length | list[Length | None],
    "max_position_embeddings": Positions,
    "original_max_position_embeddings": Positions,
    "rms_norm_eps": Epsilon,
    "layernorm_epsilon": Epsilon,
    "rope_theta": Theta | list[Theta | None],
    "rope_type": str,
    "type": str,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), Factor),
    **dict.fromkeys(_CAPS, Divisor | list[Divisor | None]),
    "query_pre_attn_scalar": Annotated[float, msgspec.Meta(le=2.0**20)],
    **dict.fromkeys(("mscale", "mscale_all_dim"), Annotated[float, msgspec.Meta(ge=0.0, le=2.0**20)]),
    "partial_rotary_factor": Share,
    **dict.fromkeys(("short_factor", "long_factor"), list[Factor]),
    "eos_token_id": TokenId | list[TokenId],
}
"""Field of a config.json, of its text part or of its rotary parameters -> type and range. Null is always accepted. Fields that
are not here are checked by the family that reads them."""
_RANGES = dict.fromkeys(_WIDTHS, range(2**20 + 1)) | dict.fromkeys(_EXPERTS, range(2**14 + 1))
_RANGES |= dict.fromkeys(("hidden_size", "num_attention_heads"), range(1, 2**20 + 1))
RANGES = _RANGES | {name + "_list": numbers for name, numbers in _RANGES.items()}
"""Field -> what an integer in it, alone or in a list, may be. The family checks the type, layer by layer."""
_PARTS = ("text_config", "rope_parameters", "rope_scaling", "per_layer_config")
"""Fields that hold such fields, directly or by the kind or the number of a layer."""


def typed(value: Any, kind: Any, file: Path, field: str) -> Any:
    """A value of a file in the type that its field has.

    Raises:
        ConfigError: it is of another type or out of range; names file and field.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        expected, _, path = str(error).replace("Expected", "expected").partition(" - at `$")
        where = f"{file}: {field}{path.removesuffix('`')}"
        raise ConfigError(f"{where} is {shown(value)}: {expected}", "model") from None


def sampling_default(name: str, value: object, file: Path, field: str) -> Any:
    """A sampling parameter that a model's file gives.

    Raises:
        ConfigError: no request may have it; names file and field.
    """
    try:
        check_value(options(SamplingParams)[name], value, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{file}: {field}: {error.message}", "model") from None
    return value


def check_config(raw: Mapping[str, Any], file: Path, where: str = "") -> None:
    """Checks the fields of a configuration that FIELDS declares.

    Raises:
        ConfigError: as ``typed``.
    """
    for name, value in raw.items():
        if value is not None and name in FIELDS:
            typed(value, FIELDS[name], file, where + name)
        numbers = RANGES.get(name)
        for number in value if isinstance(value, list) else [value]:
            if numbers and isinstance(number, int) and number not in numbers:
                limits = f"[{numbers[0]}, {numbers[-1]}]"
                raise ConfigError(f"{file}: {where}{name} must be in {limits}, not {shown(number)}", "model")
        if isinstance(value, dict) and (where or name in _PARTS):
            check_config(value, file, f"{where}{name}.")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: it is none, nested deeper than MAX_DEPTH, or says two things of a key; names the file.
    """
    try:
        value = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise _too_deep(file) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} does not hold a JSON object", "model")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise _too_deep(file)


def _too_deep(file: Path) -> ConfigError:
    return ConfigError(f"{file} cannot be read: lists and objects are nested more than {MAX_DEPTH} deep", "model")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {shown(key)} is there twice, with different values")
        found[key] = value
    return found
