"""DeepSeek V3: V2 whose experts have sigmoid scores, chosen by groups with a correction (R1 is of this family too)."""

from __future__ import annotations

from headrace.model_spec import ModelSpec
from headrace.models.decoder import Decoder
from headrace.models.families.deepseek_v2 import DeepseekDecoder, mla_model_spec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig
from headrace.models.moe_config import grouped_mixture, must_be
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "DeepseekV3ForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    return mla_model_spec(config, ARCHITECTURE, grouped_mixture(config), rotary_pairs=bool(config.rope_interleave))


def names(model: Decoder) -> NameTable:
    """Ignores the extra layer for multi-token prediction."""
    return decoder_names(model, ignorable=(rf"model\.layers\.{model.spec.num_layers}\..*",))


FAMILY = Family(
    model_spec=model_spec,
    decoder=DeepseekDecoder,
    names=names,
)
