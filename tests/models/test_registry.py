"""Configurations become specs; what they ask for and we cannot do is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.models import hybrids, indexed, mixtures
from support.models.cases import CASES, GEMMA3, GEMMA4, SMALL
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.errors import ConfigError, ContradictionError
from headrace.model_spec import CLAMPED_SWIGLU, DenseSpec, ModelSpec, MoeSpec
from headrace.models import registry
from headrace.models.families.gemma4 import Gemma4Spec


def spec_of(config: PretrainedConfig) -> ModelSpec:
    return registry.model_spec(config)


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, **changes})


def test_what_is_supported() -> None:
    names = registry.supported()
    assert names[:3] == ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]
    assert {"Qwen3ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM"} <= set(names)


def test_every_architecture_is_in_the_table_of_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(registry.supported())


def test_every_family_is_tested_against_transformers() -> None:
    """Elastic attention, which transformers does not have, is tested in tests/runner/parts/test_sparse.py. The Llama 4 of
    transformers that has pictures generates no text: test_llama4.py reads its checkpoints, and test_indexed.py dots3's."""
    elsewhere = {"PawQwen3ForCausalLM", "PawLlamaForCausalLM", "Llama4ForConditionalGeneration"}
    elsewhere |= {"Dots3NoteForConditionalGeneration"}
    tested = {model_class.__name__ for model_class, _, _ in CASES.values()} | hybrids.architectures() | indexed.architectures()
    assert tested == set(registry.supported()) - elsewhere


@pytest.mark.parametrize("architectures", [None, ["BertModel"]])
def test_an_unknown_architecture_lists_the_known(architectures: list[str] | None) -> None:
    with pytest.raises(ConfigError, match=r"supported are: LlamaForCausalLM, MistralForCausalLM, Qwen2") as caught:
        spec_of(BertConfig(architectures=architectures))
    assert caught.value.param == "model"


def test_another_head_on_the_same_body_is_not_the_model() -> None:
    with pytest.raises(ConfigError, match="LlamaForQuestionAnswering is not supported"):
        spec_of(llama(architectures=["LlamaForQuestionAnswering"]))


def test_llama() -> None:
    spec = spec_of(llama(architectures=["LlamaForCausalLM"], dtype=torch.bfloat16, attention_bias=True, mlp_bias=True))
    assert (spec.architecture, spec.dtype, spec.max_position) == ("LlamaForCausalLM", "bfloat16", 256)
    assert spec.attention_bias and spec.output_bias and all(mlp.bias for mlp in spec.mlps) and not spec.qk_norm
    assert {(one.num_heads, one.num_kv_heads, one.head_dim, one.rotary_dim, one.window) for one in spec.layers} == {
        (6, 2, 8, 8, None)
    }
    assert spec.layers[2].scale == 8**-0.5


def test_head_dim_of_its_own() -> None:
    (first, *_) = spec_of(llama(head_dim=20)).layers
    assert (first.head_dim, first.v_head_dim, first.q_size, first.out_size) == (20, 20, 120, 120)


def test_windows() -> None:
    assert [one.window for one in spec_of(MistralConfig(**SMALL, sliding_window=9)).layers] == [9, 9, 9]
    assert [one.window for one in spec_of(MistralConfig(**SMALL, sliding_window=None)).layers] == [None] * 3
    qwen = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    assert [one.window for one in spec_of(qwen).layers] == [None, None, 5]
    off = Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=5, max_window_layers=0)
    assert [one.window for one in spec_of(off).layers] == [None] * 3


def test_qwen() -> None:
    two, three = spec_of(Qwen2Config(**SMALL)), spec_of(Qwen3Config(**SMALL, head_dim=16))
    assert (two.attention_bias, two.output_bias, two.qk_norm) == (True, False, False)
    assert (three.attention_bias, three.output_bias, three.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("rope", "theta", "kind", "longest"),
    [
        ({}, 10000.0, "default", 256),
        ({"rope_theta": 5e5}, 5e5, "default", 256),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, "default", 256),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 2e4, "linear", 512),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, 1e4, "dynamic", 768),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1e4, "yarn", 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 1e4, "yarn", 256),
    ],
)
def test_rope_in_old_and_new_manner(rope: dict, theta: float, kind: str, longest: int) -> None:
    spec = spec_of(llama(**rope))
    for layer in spec.layers:
        assert layer.rope is not None
        assert (layer.rope.theta, layer.rope.kind, spec.max_position) == (theta, kind, longest)


def test_rope_by_the_layers_type() -> None:
    config = Qwen2Config(**SMALL, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    sets = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    object.__setattr__(config, "rope_parameters", sets)
    object.__setattr__(config, "sliding_window", 8)
    spec = spec_of(config)
    ropes = [layer.rope for layer in spec.layers]
    assert [rope and (rope.theta, rope.kind) for rope in ropes] == [(1e4, "linear"), (5e5, "default"), (1e4, "linear")]
    assert spec.max_position == 256


def test_per_layer_config() -> None:
    config = llama(per_layer_config={1: {"num_key_value_heads": 3}, 2: {"num_key_value_heads": 1, "head_dim": 12}})
    layers = spec_of(config).layers
    assert [one.num_kv_heads for one in layers] == [2, 3, 1]
    assert [one.head_dim for one in layers] == [8, 8, 12]
    assert [one.v_head_dim for one in layers] == [8, 8, 12]


def test_mlps_of_their_own_width() -> None:
    spec = spec_of(llama(per_layer_config={1: {"intermediate_size": 32, "hidden_act": "gelu"}}))
    assert [(mlp.intermediate_size, mlp.act) for mlp in spec.mlps] == [(80, "silu"), (32, "gelu"), (80, "silu")]
    model = registry.build(spec, "float32", "cpu")
    assert [layer.mlp.down_proj.in_features for layer in model.layers] == [80, 32, 80]


def test_lists_of_the_layers() -> None:
    config = llama()
    config.num_key_value_heads_list = [1, 2, 6]
    config.v_head_dim = 5
    layers = spec_of(config).layers
    assert [one.num_kv_heads for one in layers] == [1, 2, 6]
    assert {one.v_head_dim for one in layers} == {5}


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"num_key_value_heads_list": [1, 2]}, "num_key_value_heads", "2 entries for 3 layers: layer 2 has none"),
        ({"num_key_value_heads_list": [1, 2, 3, 6]}, "num_key_value_heads", "4 entries for 3 layers: there is no layer 3"),
        ({"v_head_dim": [8]}, "v_head_dim", "1 entries for 3 layers: layer 1 has none"),
        ({"num_key_value_heads_list": [1, 2, 4]}, "num_kv_heads", "layer 2: 6 query heads"),
        ({"num_key_value_heads_list": [1, -2, 3]}, "num_key_value_heads", "layer 1: .* not -2"),
        ({"num_key_value_heads_list": [1, 2, "3"]}, "num_key_value_heads", "layer 2: .* not '3'"),
        ({"v_head_dim": [8, 8, 0]}, "v_head_dim", "layer 2: .* not 0"),
        ({"pretraining_tp": 2}, "pretraining_tp", "pretraining_tp 2"),
        ({"hidden_act": "relu6"}, "hidden_act", "'relu6' is not supported; supported are: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping", "30.0"),
        ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers", "layer 1"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters", "'longrope'"),
        ({"rope_parameters": {"rope_type": "bent", "rope_theta": 1e4}}, "rope_parameters", "'bent'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters", "factor .* missing"),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters", "layer 0: .* no set for full_attention"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "rope_parameters", "mrope_section"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters", "rope_theta must be"),
        ({"vocab_size": 0}, "vocab_size", "not 0"),
        ({"intermediate_size": None}, "intermediate_size", "not None"),
        ({"head_dim": 7}, "head_dim", "layer 0: head_dim 7 is odd"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes: dict, param: str, message: str) -> None:
    config = llama()
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        spec_of(config)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ({"skip": ["mlp"]}, "per_layer_config"),
    ],
)
def test_layers_that_differ_where_we_cannot_are_refused(overrides: dict, param: str) -> None:
    with pytest.raises(ConfigError, match="layer 1: ") as caught:
        spec_of(llama(per_layer_config={1: overrides}))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("types", "window", "message"),
    [
        (["full_attention", "chunked_attention", "full_attention"], 8, "layer 1: layer_types 'chunked_attention'"),
        (["full_attention", "full_attention", "sliding_attention"], None, "layer 2: .* without a sliding_window"),
        (["full_attention"], 8, "1 entries for 3 layers"),
    ],
)
def test_layer_types_are_checked(types: list[str], window: int | None, message: str) -> None:
    config = Qwen2Config(**SMALL)
    object.__setattr__(config, "layer_types", types)
    object.__setattr__(config, "sliding_window", window)
    with pytest.raises(ConfigError, match=message):
        spec_of(config)


def test_build_leaves_parameters_where_and_as_asked() -> None:
    model = registry.build(spec_of(llama()), "bfloat16", "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not model.training


def test_gemma3() -> None:
    spec = spec_of(Gemma3TextConfig(**SMALL | GEMMA3 | {"max_position_embeddings": 256, "final_logit_softcapping": 30.0}))
    assert [one.window for one in spec.layers] == [7, None, 7, 7, None]
    assert {one.scale for one in spec.layers} == {24**-0.5}
    assert [one.rope and one.rope.theta for one in spec.layers[:2]] == [1e4, 1e6]
    assert (spec.max_position, spec.logit_soft_cap, spec.mlps[0].act) == (256, 30.0, "gelu_pytorch_tanh")
    assert spec.tie_word_embeddings
    assert hash(spec.layers[0]) == hash(spec_of(Gemma3TextConfig(**SMALL | GEMMA3)).layers[0])


def test_gemma4() -> None:
    config = Gemma4TextConfig(**SMALL | GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True})
    spec = spec_of(config)
    assert isinstance(spec, Gemma4Spec)
    assert [(one.head_dim, one.rotary_dim, one.window) for one in spec.layers] == [
        (8, 8, 7),
        (16, 16, None),
        (8, 8, 7),
        (8, 8, 7),
        (16, 16, None),
    ]
    assert [one.kv_source for one in spec.layers] == [None, None, None, 2, 1]
    assert [mlp.intermediate_size for mlp in spec.mlps] == [80, 80, 80, 160, 160]
    assert (spec.token_width, spec.layers[1].scale) == (6, 1.0)


def test_layers_that_share_kv_are_of_one_geometry() -> None:
    config = Gemma4TextConfig(**SMALL | GEMMA4 | {"num_kv_shared_layers": 2})
    config.num_key_value_heads_list = [2, 2, 2, 2, 3]
    with pytest.raises(ContradictionError, match="layer 4: kv_source 1 has num_kv_heads 2, not 3"):
        spec_of(config)


@pytest.mark.parametrize(
    ("config", "param", "message"),
    [
        (Gemma3TextConfig(**SMALL | GEMMA3 | {"use_bidirectional_attention": True}), "use_bidirectional_attention", "True"),
        (Gemma3TextConfig(**SMALL | GEMMA3 | {"attn_logit_softcapping": 20.0}), "attn_logit_softcapping", "20.0"),
        (Gemma4TextConfig(**SMALL | GEMMA4 | {"use_bidirectional_attention": "all"}), "use_bidirectional_attention", "text"),
        (
            Gemma4TextConfig(**SMALL | GEMMA4 | {"num_kv_shared_layers": 4}),
            "num_kv_shared_layers",
            "layer 1: .* no full_attention",
        ),
    ],
)
def test_what_gemma_does_not_do_is_refused(config: PretrainedConfig, param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec_of(config)
    assert caught.value.param == param


def test_gpt_oss() -> None:
    spec = spec_of(GptOssConfig(**SMALL | mixtures.GPT_OSS))
    assert [one.window for one in spec.layers] == [7, None, 7]
    assert all(one.sinks and one.rope is not None and one.rope.kind == "yarn" for one in spec.layers)
    assert spec.layers[0].rope is not None and spec.layers[0].rope.theta == 150000.0
    assert (spec.attention_bias, spec.output_bias) == (True, True)
    (mlp, *_) = spec.mlps
    assert isinstance(mlp, MoeSpec) and (mlp.act, mlp.limit, mlp.router_bias, mlp.bias) == (CLAMPED_SWIGLU, 7.0, True, True)


def test_mimo() -> None:
    """Layers with a window have other KV heads, and sinks; K and V differ in all."""
    spec = spec_of(MiMoV2FlashConfig(**SMALL | mixtures.MIMO))
    assert [(one.num_kv_heads, one.window, one.sinks) for one in spec.layers] == [
        (2, None, False),
        (4, 8, True),
        (4, 8, True),
        (2, None, False),
    ]
    assert {(one.head_dim, one.v_head_dim, one.rotary_dim) for one in spec.layers} == {(24, 16, 8)}
    assert [one.rope and one.rope.theta for one in spec.layers[:2]] == [5e6, 1e4]
    assert [type(mlp) for mlp in spec.mlps] == [DenseSpec, MoeSpec, MoeSpec, MoeSpec]
    said = MiMoV2FlashConfig(**SMALL | mixtures.MIMO, swa_num_key_value_heads=6, swa_head_dim=24)
    assert [one.num_kv_heads for one in spec_of(said).layers] == [2, 6, 6, 2]
    assert spec.max_position == 256


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"swa_num_key_value_heads": 5}, "num_kv_heads", "layer 1: 12 query heads .* 5 KV heads"),
        ({"swa_v_head_dim": 24}, "swa_v_head_dim", "layer 1: swa_v_head_dim 24"),
        ({"mlp_layer_types": ["dense", "sparse", "thin", "sparse"]}, "mlp_layer_types", "layer 2: .* 'thin'"),
        ({"n_group": 3}, "num_groups", "8 experts do not make 3 equal groups"),
    ],
)
def test_what_mimo_does_not_do_is_refused(changes: dict, param: str, message: str) -> None:
    config = MiMoV2FlashConfig(**SMALL | mixtures.MIMO)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        spec_of(config)
    assert caught.value.param == param
