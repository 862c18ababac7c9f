"""gpt-oss: sinks in every layer, windows in every other one, and experts with biases and a gate of their own."""

from __future__ import annotations

import dataclasses
from functools import partial

from headrace.layers.moe import Experts
from headrace.model_spec import CLAMPED_SWIGLU, ModelSpec, MoeSpec
from headrace.model_spec.projection import halves
from headrace.models.decoder import Decoder
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, required, windows_by_type
from headrace.models.moe_config import must_be, number
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "GptOssForCausalLM"
_MOVED = {
    ".attention.sinks": ".sinks",
    ".mlp.gate.weight": ".mlp.router.weight",
    ".mlp.gate.bias": ".mlp.router.bias",
}


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "hidden_act", "silu")
    layers = attention_specs(config, windows=windows_by_type(config))
    moe = MoeSpec(
        num_experts=required(config, "num_local_experts"),
        top_k=required(config, "num_experts_per_tok"),
        intermediate_size=required(config, "intermediate_size"),
        act=CLAMPED_SWIGLU,
        alpha=number(config, "swiglu_alpha", 1.702),
        limit=number(config, "swiglu_limit", 7.0),
        bias=True,
        router_bias=True,
    )
    return decoder_spec(
        config,
        ARCHITECTURE,
        tuple(dataclasses.replace(layer, sinks=True) for layer in layers),
        [moe] * len(layers),
        **attention_biases(config, True),
    )


def names(model: Decoder) -> NameTable:
    return decoder_names(model, _MOVED, experts=_experts)


def _experts(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """All experts in a tensor, inputs before outputs, rows of gate and up in turns; or in MXFP4, outputs before inputs."""
    turns = partial(halves, 2 * module.spec.intermediate_size)
    table.add(f"{theirs}.gate_up_proj", f"{ours}.gate_up_proj", layout=StoredLayout(turns, axis=1, transposed=True))
    table.instead(f"{theirs}.gate_up_proj_blocks", f"{ours}.gate_up_proj", StoredLayout(turns, axis=1))
    table.add(f"{theirs}.gate_up_proj_bias", f"{ours}.gate_up_proj_bias", layout=StoredLayout(turns, axis=1))
    table.add(f"{theirs}.down_proj", f"{ours}.down_proj", layout=StoredLayout(transposed=True))
    table.instead(f"{theirs}.down_proj_blocks", f"{ours}.down_proj")
    table.add(f"{theirs}.down_proj_bias", f"{ours}.down_proj_bias")


FAMILY = Family(model_spec=model_spec, names=names)
