"""DeepSeek V3: V2 whose experts have sigmoid scores, chosen by groups with a correction (R1 is of this family too)."""

from __future__ import annotations

from headrace.model_spec import ModelSpec, MoeSpec
from headrace.models.decoder import Decoder
from headrace.models.families.deepseek_v2 import DeepseekDecoder, mla_model_spec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, required
from headrace.models.moe_config import experts_of, must_be, number, shared_experts
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "DeepseekV3ForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    experts = experts_of(config, "n_routed_experts", "num_experts_per_tok")
    moe = MoeSpec(
        **experts,
        shared=shared_experts(config, "n_shared_experts", experts["intermediate_size"]),
        scoring="sigmoid",
        correction_bias=True,
        num_groups=required(config, "n_group"),
        top_groups=required(config, "topk_group"),
        group_score="top2",
        normalize=bool(config.norm_topk_prob),
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )
    return mla_model_spec(config, ARCHITECTURE, moe, rotary_pairs=bool(config.rope_interleave))


def names(model: Decoder) -> NameTable:
    """Ignores the extra layer for multi-token prediction."""
    return decoder_names(model, ignorable=(rf"model\.layers\.{model.spec.num_layers}\..*",))


FAMILY = Family(
    model_spec=model_spec,
    decoder=DeepseekDecoder,
    names=names,
)
