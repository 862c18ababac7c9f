"""Kimi Linear: three layers of four are delta rules that decay by channel, the others DeepSeek's latent attention without
positions; mixtures are DeepSeek V3's."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.kernels.state import causal_conv, delta_rule
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear
from headrace.layers.short_conv import CausalConv, StateMixer
from headrace.layers.state import GatedNorm
from headrace.model_spec import ConvSpec, ModelSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer, RopeAngles
from headrace.models.families.deepseek_v2 import DeepseekSpec, MLASelfAttention, mla_specs
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attending, attention_biases, decoder_spec, hybrid_mixers, required
from headrace.models.interface import ModelInputs
from headrace.models.moe_config import grouped_mixture, must_be, typed_specs
from headrace.models.names import block_sparse_experts, decoder_names
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "KimiLinearForCausalLM"
_MOVED = {
    ".linear_attn.in_proj": ".self_attn.in_proj",
    ".linear_attn.in_proj.weight": ".self_attn.in_proj.weight",
    ".linear_attn.low_proj": ".self_attn.low_proj",
    ".linear_attn.low_proj.weight": ".self_attn.low_proj.weight",
    ".linear_attn.f_b_proj.weight": ".self_attn.f_b_proj.weight",
    ".linear_attn.g_b_proj.weight": ".self_attn.g_b_proj.weight",
    ".linear_attn.conv1d.weight": ".self_attn.conv1d.weight",
    ".linear_attn.A_log": ".self_attn.A_log",
    ".linear_attn.dt_bias": ".self_attn.dt_bias",
    ".linear_attn.norm.weight": ".self_attn.o_norm.weight",
    ".linear_attn.out_proj.weight": ".self_attn.o_proj.weight",
}
"""Suffixes of the model's names -> of a published checkpoint's."""
_RATES = StoredLayout(ones=(0, 1, 3))


class KimiDeltaAttention(StateMixer):
    """The delta rule whose state decays by channel, between its projections. Decays and gates come by way of few channels."""

    outputs: ClassVar = {
        "in_proj": ("keys", "keys", "values", "heads"),
        "f_b_proj": ("keys",),
        "g_b_proj": ("values",),
        "conv1d": ("keys", "keys", "values"),
        "A_log": ("heads",),
        "dt_bias": ("keys",),
    }

    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        if spec.conv is None:
            raise ValueError(f"state layer {spec.index} has no convolution")
        self.spec, hidden = spec, model.hidden_size
        keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
        inputs = {"q_proj": keys, "k_proj": keys, "v_proj": values, "b_proj": spec.heads}
        self.in_proj = FusedLinear(hidden, inputs, dtype=dtype, device=device)
        low = {"f_a_proj": spec.key_dim, "g_a_proj": spec.value_dim}
        self.low_proj = FusedLinear(hidden, low, dtype=dtype, device=device)
        self.f_b_proj = Linear(spec.key_dim, keys, dtype=dtype, device=device)
        self.g_b_proj = Linear(spec.value_dim, values, dtype=dtype, device=device)
        self.conv1d = CausalConv(spec.conv.channels, spec.conv.width, bias=False, dtype=dtype, device=device)
        rates, biases = (torch.empty(width, dtype=torch.float32, device=device) for width in (spec.heads, keys))
        self.A_log = nn.Parameter(rates, requires_grad=False)
        self.dt_bias = nn.Parameter(biases, requires_grad=False)
        self.norm = GatedNorm(spec.value_dim, model.norm_eps, width=spec.value_dim, gate="sigmoid", dtype=dtype, device=device)
        self.out_proj = RowParallelLinear(values, hidden, dtype=dtype, device=device)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return self.in_proj, self.low_proj

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, the rank's part of the sum over tensor-parallel ranks. Positions play no part."""
        spec = self.spec
        rows, own = ctx.state_of(spec.index)
        if own.conv is None or own.state is None:
            raise ValueError(f"state layer {spec.index} keeps no convolution's inputs, or no state")
        qkv, beta = self.in_proj(x).split_with_sizes((spec.mixed_channels, spec.heads), dim=1)
        decay, gate = self.low_proj(x).split_with_sizes((spec.key_dim, spec.value_dim), dim=1)
        decay, gate = self.f_b_proj(decay.contiguous()), self.g_b_proj(gate.contiguous())
        qkv = causal_conv(qkv, self.conv1d.weight[:, 0], None, "silu", own.conv, rows)
        out = delta_rule(qkv, decay, beta, self.A_log, self.dt_bias, own.state, rows)
        return self.out_proj(self.norm(out, gate))  # type: ignore[no-any-return]


class KimiLayer(DecoderLayer):
    attention_class = MLASelfAttention
    state_class: type[nn.Module] = KimiDeltaAttention


class NoAngles(RopeAngles):
    """Angles of 0: the channels of the latent that other models rotate stay as they are."""

    def __init__(self, spec: ModelSpec, device: str | torch.device) -> None:
        super().__init__(spec, device)
        width = spec.layers[0].rotary_dim
        self._none = torch.cat((torch.ones(width // 2), torch.zeros(width // 2))).to(device)

    def __call__(self, inputs: ModelInputs, ctx: ForwardContext) -> list[torch.Tensor | None]:
        angles = self._none.repeat(len(inputs.positions), 1)
        return [None if index is None else angles for index in self._of_layer]


class KimiDecoder(Decoder):
    layer_class = KimiLayer

    def build_rotary(self, device: str | torch.device) -> RopeAngles:
        return NoAngles(self.spec, device)


def names(model: Decoder) -> NameTable:
    """transformers' modules have other names than published checkpoints around a delta rule, and for MLPs and mixtures."""
    table = decoder_names(model, _MOVED, experts=block_sparse_experts, layouts={".A_log": _RATES})
    for parameter in table.parameters():
        if ".mlp." in parameter and ".experts." not in parameter:
            stored = {name: table.part(name) for name in table.names(parameter)}
            rows = {name: part.stop - part.start for name, part in stored.items() if part is not None and part.stop is not None}
            moved = {name.replace(".mlp.", ".block_sparse_moe."): rows.get(name, 0) for name in stored}
            table.instead(moved if rows else next(iter(moved)), parameter)
    for layer, block in enumerate(model.spec.blocks):
        ours, theirs = f"layers.{layer}.linear_attn", f"model.layers.{layer}.self_attn"
        if block.state is not None:
            spec = model.spec.states[block.state]
            conv = () if spec.conv is None else spec.conv.parts
            table.instead({f"{theirs}.{name}_conv1d.weight": rows for name, rows in conv}, f"{ours}.conv1d.weight")
            gate = f"{theirs}.forget_gate"
            low = {f"{gate}.f_a_proj.weight": spec.key_dim, f"{theirs}.g_a_proj.weight": spec.value_dim}
            table.instead(low, f"{ours}.low_proj.weight")
            table.instead(f"{gate}.f_b_proj.weight", f"{ours}.f_b_proj.weight")
            table.instead(f"{gate}.dt_bias", f"{ours}.dt_bias")
            table.instead(f"{gate}.A_log", f"{ours}.A_log", _RATES)
    return table


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "hidden_act", "silu")
    mixers = hybrid_mixers(config, "linear_attention")
    layers = attending(mla_specs(config), mixers)
    heads, width = required(config, "linear_num_heads"), required(config, "linear_head_dim")
    conv = ConvSpec(
        required(config, "linear_conv_kernel_dim"),
        tuple((part, heads * width) for part in "qkv"),
        bias=False,
        activation="silu",
    )
    moe = grouped_mixture(config, "num_local_experts")
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        typed_specs(config, moe),
        kind=DeepseekSpec,
        rotary_pairs=False,
        mixers=mixers,
        states=tuple(StateSpec(index, "kda", heads, heads, width, width, conv) for index in range(len(mixers) - len(layers))),
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec, decoder=KimiDecoder, names=names)
