"""ERNIE 4.5: Llama whose rotary embedding pairs neighbouring channels, with biases everywhere or nowhere.

q and k are held with the first channels of all pairs before the second ones, so that attention rotates halves as it does
for every family: q.k is the same in any order of channels.
"""

from __future__ import annotations

from functools import partial

import torch

from headrace.model_spec import AttentionSpec, ModelSpec
from headrace.model_spec.projection import halves, of_heads
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, dense_specs, uniform

ARCHITECTURE = "Ernie4_5ForCausalLM"


class PairedAttention(DecoderAttention):
    """Checkpoints have the channels of q and k in pairs."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        order = halves(spec.head_dim)
        self.qkv_proj.stored_rows = {
            "q_proj": partial(of_heads, spec.num_heads, order),
            "k_proj": partial(of_heads, spec.num_kv_heads, order),
        }


class ErnieLayer(DecoderLayer):
    attention_class = PairedAttention


class ErnieDecoder(Decoder):
    layer_class = ErnieLayer


def model_spec(config: HFConfig) -> ModelSpec:
    bias = bool(uniform(config, "use_bias", False))
    layers = attention_specs(config)
    return decoder_spec(config, ARCHITECTURE, layers, dense_specs(config, bias=bias), attention_bias=bias, output_bias=bias)


FAMILY = Family(model_spec=model_spec, decoder=ErnieDecoder)
