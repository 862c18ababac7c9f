"""Windows that a config.json asks for: each family has them as transformers' module of it does, or refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.errors import ConfigError
from headrace.model_spec import ModelSpec
from headrace.models import registry
from models.saved_config import native_spec

SMALL = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
FULL, WINDOW = "full_attention", "sliding_attention"
NONE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Ernie4_5ForCausalLM": {"model_type": "ernie4_5"},
    "Ernie4_5_MoeForCausalLM": {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", "topk_method": "greedy", **MLA},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **MLA},
}
ALL: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"model_type": "mistral"},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "use_sliding_window": True, **MOE},
}
SOME: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "use_sliding_window": True},
}


def spec_of(folder: Path, architecture: str, changes: dict[str, Any]) -> ModelSpec:
    config = SMALL | {"architectures": [architecture]} | (NONE | ALL | SOME)[architecture] | changes
    return native_spec(folder, config)


@pytest.mark.parametrize("architecture", NONE)
@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"layer_types": [FULL, WINDOW, FULL], "sliding_window": 8}, "layer_types", "layer 1: .* no window"),
        ({"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types", "layer 2: layer_types 'linear_attention'"),
        ({"sliding_window": 8}, "sliding_window", "layer 0: sliding_window 8"),
    ],
)
def test_families_without_windows_refuse_them(
    architecture: str, changes: dict[str, Any], param: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec_of(tmp_path, architecture, changes)
    assert caught.value.param == param


@pytest.mark.parametrize("architecture", NONE)
@pytest.mark.parametrize("changes", [{}, {"layer_types": [FULL] * 3, "sliding_window": 8}, {"sliding_window": 256}])
def test_what_asks_for_no_window_is_served(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert {one.window for one in spec_of(tmp_path, architecture, changes).layers} == {None}


@pytest.mark.parametrize("architecture", ALL)
def test_families_with_a_window_in_all_layers_refuse_layers_without(architecture: str, tmp_path: Path) -> None:
    served = spec_of(tmp_path, architecture, {"layer_types": [WINDOW] * 3, "sliding_window": 8})
    assert [one.window for one in served.layers] == [8, 8, 8]
    with pytest.raises(ConfigError, match=r"layer 1: layer_types 'full_attention', but such layers .* have a window"):
        spec_of(tmp_path, architecture, {"layer_types": [WINDOW, FULL, WINDOW], "sliding_window": 8})


@pytest.mark.parametrize("architecture", SOME)
def test_families_with_windows_in_some_layers_have_them_there(architecture: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architecture, {"layer_types": [WINDOW, FULL, WINDOW], "sliding_window": 8})
    assert [one.window for one in spec.layers] == [8, None, 8]


@pytest.mark.parametrize("architecture", NONE | ALL | SOME)
def test_kv_heads_of_each_layer(architecture: str, tmp_path: Path) -> None:
    """All families have them but those whose heads all make their own KV of a latent."""
    changes = {"num_key_value_heads_list": [6, 2, 1]}
    if not architecture.startswith("Deepseek"):
        assert [one.num_kv_heads for one in spec_of(tmp_path, architecture, changes).layers] == [6, 2, 1]
        return
    with pytest.raises(ConfigError, match="layer 1: num_key_value_heads 2 is not") as caught:
        spec_of(tmp_path, architecture, changes)
    assert caught.value.param == "num_key_value_heads"


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        (transformers.MistralConfig, [8] * 6),
        (transformers.Qwen2Config, [None, None, 8, 8, 8, 8]),
        (transformers.Qwen3Config, [None, None, 8, 8, 8, 8]),
        (transformers.Qwen3MoeConfig, [8] * 6),
        (transformers.Gemma3TextConfig, [8, 8, 8, 8, 8, None]),
        (transformers.Gemma4TextConfig, [8, 8, 8, 8, 8, None]),
        (transformers.GptOssConfig, [8, None] * 3),
        (transformers.MiMoV2FlashConfig, [None, 8, 8, 8, 8, None]),
    ],
)
def test_layer_types_that_are_not_given_are_transformers_default(
    kind: type[transformers.PretrainedConfig], windows: list[int | None]
) -> None:
    fields = {"num_hidden_layers": 6, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    config = kind(**fields)
    expected = registry.model_spec(config)
    config.layer_types = None
    spec = registry.model_spec(config)
    assert [layer.window for layer in spec.layers] == windows
    assert spec == expected
