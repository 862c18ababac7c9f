"""ERNIE 4.5 with mixtures of experts, chosen with a correction of their scores, in the layers from one to another."""

from __future__ import annotations

import torch
from torch import nn

from headrace.model_spec import ModelSpec, MoeSpec
from headrace.models.decoder import Decoder
from headrace.models.families.ernie4_5 import ErnieDecoder
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, required, uniform, whole
from headrace.models.moe_config import experts_of, mixed_specs, number, shared_experts
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
_CORRECTION = ".mlp.gate.e_score_correction_bias"
_STORED = (".mlp.moe_statics.e_score_correction_bias", ".mlp.gate.moe_statics.e_score_correction_bias")
"""Names of the correction in checkpoints and in transformers' modules."""


class ErnieMoeDecoder(ErnieDecoder):
    """The output head has a bias where all matrices have."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(spec, dtype, device)
        if spec.output_bias:
            self.lm_head.bias = nn.Parameter(torch.empty(spec.head_rows, dtype=dtype, device=device), requires_grad=False)


def model_spec(config: HFConfig) -> ModelSpec:
    bias = bool(uniform(config, "use_bias", False))
    experts = experts_of(config, "moe_num_experts", "moe_k")
    moe = MoeSpec(
        **experts,
        shared=shared_experts(config, "moe_num_shared_experts", experts["intermediate_size"], bias=bias),
        correction_bias=True,
        least_sum=number(config, "moe_norm_min", 1e-12),
    )
    first, last = whole(config, "moe_layer_start_index"), whole(config, "moe_layer_end_index", least=-1)
    step = required(config, "moe_layer_interval")
    last = required(config, "num_hidden_layers") - 1 if last == -1 else last
    mlps = mixed_specs(config, moe, lambda layer: first <= layer <= last and (layer + 1) % step == 0, bias=bias)
    return decoder_spec(config, ARCHITECTURE, attention_specs(config), mlps, attention_bias=bias, output_bias=bias)


def names(model: Decoder) -> NameTable:
    wrapped = StoredLayout(ones=(0,))
    table = decoder_names(
        model, {_CORRECTION: _STORED[0]}, layouts={_CORRECTION: wrapped}, ignorable=(r"model\.mtp_.*", r"mtp\..*")
    )
    for ours in table.parameters():
        if ours.endswith(_CORRECTION):
            table.instead(f"model.{ours.removesuffix(_CORRECTION)}{_STORED[1]}", ours, wrapped)
    return table


FAMILY = Family(model_spec=model_spec, decoder=ErnieMoeDecoder, names=names)
