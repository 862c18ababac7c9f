"""Text part of ERNIE 4.5 VL: positions in time, height and width, and mixtures with experts for text and others for pictures.

A token of a picture or video, or of the markers around it, goes through the experts of pictures; every token goes through the
shared ones.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from headrace.attention.context import ForwardContext, TokenKinds
from headrace.errors import ConfigError, ContradictionError
from headrace.kernels.linear.fp8_reference import Activations
from headrace.kernels.moe import route, router_logits
from headrace.layers.moe import ExpertRouter, Experts, MoeMLP
from headrace.model_spec import AttentionSpec, ModelSpec, MoeSpec
from headrace.model_spec.integers import is_integer
from headrace.models.decoder import Decoder
from headrace.models.families.ernie4_5 import ErnieLayer
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, required, text_part, uniform
from headrace.models.moe_config import activation, number, shared_experts, typed_specs
from headrace.models.names import decoder_names, experts_apart
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"
_VISION = "vision_experts"


class ErnieVLRouter(ExpertRouter):
    """Chooses among the experts of text, or among those of pictures."""

    e_score_correction_bias: nn.Parameter
    """``[2, num_experts]``: of text, and of pictures."""

    def __init__(self, hidden_size: int, spec: MoeSpec, *, device: str | torch.device) -> None:
        super().__init__(hidden_size, spec, device=device)
        self.weight_1 = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)
        """``weight`` for tokens of pictures."""
        correction = torch.empty(2, spec.num_experts, dtype=torch.float32, device=device)
        self.e_score_correction_bias = nn.Parameter(correction, requires_grad=False)

    def forward(self, x: torch.Tensor, kind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens like ``ExpertRouter``, of one of ``TokenKinds``."""
        logits = router_logits(x, (self.weight, self.weight_1)[kind], batch_invariant=self.batch_invariant)
        return route(logits, self.spec, self.e_score_correction_bias[kind])

    def choose(self, x: torch.Tensor, readers: Experts | None = None) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *self(x), None


class ErnieVLMLP(MoeMLP):
    gate: ErnieVLRouter

    def __init__(
        self, hidden_size: int, spec: MoeSpec, vision: MoeSpec, *, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__(hidden_size, spec, dtype=dtype, device=device)
        self.gate = ErnieVLRouter(hidden_size, spec, device=device)
        self.vision_experts = Experts(hidden_size, vision, dtype=dtype, device=device)
        self.experts.whole_steps = self.vision_experts.whole_steps = False

    def forward(self, x: torch.Tensor, kinds: TokenKinds | None = None) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``; ``kinds`` as of ``ForwardContext``."""
        if kinds is None:
            return super().forward(x)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        out = torch.empty_like(x)
        for kind, (tokens, experts) in enumerate(zip(kinds, (self.experts, self.vision_experts), strict=True)):
            if len(tokens):
                own = x.index_select(0, tokens)
                plus = None if shared is None else shared.index_select(0, tokens)
                out.index_copy_(0, tokens, experts(own, *self.gate(own, kind), plus))
        return out


class ErnieVLLayer(ErnieLayer):
    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        spec = model.mlps[index]
        if isinstance(spec, MoeSpec) and spec.vision is not None:
            return ErnieVLMLP(model.hidden_size, spec, spec.vision, dtype=dtype, device=device)
        return super().build_mlp(model, index, dtype, device)

    def run_mlp(self, x: Activations, ctx: ForwardContext) -> torch.Tensor:
        return self.mlp(x, ctx.kinds) if isinstance(self.mlp, ErnieVLMLP) else super().run_mlp(x, ctx)


class ErnieVLDecoder(Decoder):
    layer_class = ErnieVLLayer


def model_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    bias = bool(uniform(text, "use_bias", False))
    widths = getattr(text, "moe_intermediate_size", None)
    if not isinstance(widths, list | tuple) or len(widths) != 2 or not all(is_integer(width, 1) for width in widths):
        raise ConfigError(
            f"config: moe_intermediate_size must be two whole numbers above 0, of text and of pictures, not {widths!r}",
            "moe_intermediate_size",
        )
    experts = MoeSpec(
        num_experts=required(text, "moe_num_experts"),
        top_k=required(text, "moe_k"),
        intermediate_size=widths[1],
        act=activation(text),
        correction_bias=True,
        least_sum=number(text, "moe_norm_min", 1e-12),
    )
    shared = shared_experts(text, "moe_num_shared_experts", widths[0], bias=bias)
    moe = dataclasses.replace(experts, intermediate_size=widths[0], shared=shared, vision=experts)
    mlps = typed_specs(text, moe, bias=bias)
    layers = tuple(map(_turned, attention_specs(text, sections=True)))
    return decoder_spec(text, ARCHITECTURE, layers, mlps, attention_bias=bias, output_bias=bias)


def _turned(layer: AttentionSpec) -> AttentionSpec:
    """A layer with the sections as ERNIE has them: its configurations say height, width and time."""
    rope = layer.rope
    if rope is None or rope.kind != "default" or not rope.sections:
        raise ConfigError(
            f"layer {layer.layer}: expected rope_parameters with mrope_section and rope_type default", "rope_parameters"
        )
    height, width, time = rope.sections
    if height != width:
        raise ContradictionError(
            f"layer {layer.layer}: mrope_section {list(rope.sections)}: height and width must have equally many angles",
            "rope_parameters",
        )
    return dataclasses.replace(layer, rope=dataclasses.replace(rope, sections=(time, height, width), time_last=True))


def names(model: Decoder) -> NameTable:
    correction, stored = ".mlp.gate.e_score_correction_bias", ".mlp.moe_statics.e_score_correction_bias"
    transposed = StoredLayout(transposed=True)
    layouts = {".mlp.gate.weight": transposed, ".mlp.gate.weight_1": transposed}
    table = decoder_names(
        model, {correction: stored}, experts=_experts, layouts=layouts, ignorable=(r"model\.mtp_.*", r"mtp\..*")
    )
    for path, module in model.named_modules():
        if isinstance(module, ErnieVLMLP):
            _add_module_names(table, path)
    return table


def _add_module_names(table: NameTable, path: str) -> None:
    """transformers' modules have the mixture of each kind of tokens apart, and its experts stacked."""
    theirs = [f"model.{path}.{name}" for name in ("text_moe", "vision_moe")]
    for mixture, weight, experts in zip(theirs, ("weight", "weight_1"), ("experts", _VISION), strict=True):
        table.instead(f"{mixture}.gate.weight", f"{path}.gate.{weight}")
        for matrix in ("gate_up_proj", "down_proj"):
            table.instead(f"{mixture}.experts.{matrix}", f"{path}.{experts}.{matrix}")
    corrections = {f"{mixture}.gate.moe_statics.e_score_correction_bias": 1 for mixture in theirs}
    table.instead(corrections, f"{path}.gate.e_score_correction_bias")


def _experts(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """Checkpoints number the experts of pictures behind those of text."""
    first = module.spec.num_experts if ours.endswith(_VISION) else 0
    experts_apart(table, theirs.replace(_VISION, "experts"), ours, module, first)


FAMILY = Family(model_spec=model_spec, decoder=ErnieVLDecoder, names=names)
