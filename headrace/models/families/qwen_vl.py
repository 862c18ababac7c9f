"""Text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with positions in time, height and width."""

from __future__ import annotations

import dataclasses

from headrace.layers.moe import Experts
from headrace.model_spec import AttentionSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    per_layer,
    text_part,
    windows_by_type,
)
from headrace.models.moe_config import experts_of, stepped_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

_QWEN2 = "Qwen2VLForConditionalGeneration"
_QWEN3 = "Qwen3VLForConditionalGeneration"
_QWEN3_MOE = "Qwen3VLMoeForConditionalGeneration"


def qwen2_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    layers = attention_specs(text, windows=windows_by_type(text), sections=True)
    return decoder_spec(text, _QWEN2, layers, dense_specs(text), attention_bias=True)


def qwen3_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    return decoder_spec(text, _QWEN3, _layers(text), dense_specs(text), qk_norm=True, **attention_biases(text))


def qwen3_moe_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    moe = MoeSpec(**experts_of(text, "num_experts", "num_experts_per_tok"), normalize=True)
    return decoder_spec(text, _QWEN3_MOE, _layers(text), stepped_specs(text, moe), qk_norm=True, **attention_biases(text))


def _layers(text: HFConfig) -> tuple[AttentionSpec, ...]:
    """The layers of Qwen3-VL, whose sections of angles always take turns."""
    layers = attention_specs(text, windows=per_layer(text, "sliding_window"), sections=True)
    return tuple(
        layer if layer.rope is None else dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, interleaved=True))
        for layer in layers
    )


def moe_names(model: Decoder) -> NameTable:
    return decoder_names(model, experts=_stacked)


def _stacked(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """Published checkpoints stack the experts with inputs before outputs, those that transformers saves the other way round."""
    for kind, parameter in module.named_parameters(recurse=False):
        table.transposable(f"{theirs}.{kind}", f"{ours}.{kind}", tuple(parameter.shape))


QWEN2_VL = Family(model_spec=qwen2_spec)
QWEN3_VL = Family(model_spec=qwen3_spec)
QWEN3_VL_MOE = Family(model_spec=qwen3_moe_spec, names=moe_names)
