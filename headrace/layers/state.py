"""Mixers that carry a state from token to token: the gated delta rule and Mamba-2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.kernels.state import Gate, Pending, StateMetadata, causal_conv, delta_rule, gated_norm, state_space
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear, lay_behind, multiply_together
from headrace.layers.short_conv import CausalConv, StateMixer
from headrace.model_spec import ModelSpec, StateSpec
from headrace.parallel.group import ALONE, Group, ordered_sum


def _vector(width: int, dtype: torch.dtype, device: str | torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)


class GatedNorm(nn.Module):
    """RMS norm of each ``width`` channels, multiplied by a gate behind it, or before it."""

    def __init__(
        self,
        channels: int,
        eps: float,
        *,
        width: int,
        gate: Gate = "silu",
        gate_first: bool = False,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        """``channels``: of the weight; where they are ``width``, all groups share it."""
        super().__init__()
        self.eps, self.width, self.gate, self.gate_first = eps, width, gate, gate_first
        self.weight = _vector(channels, dtype, device)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """``[T, n]`` float32, gates ``[T, n]`` -> ``[T, n]`` in the gates' dtype."""
        return gated_norm(x, z, self.weight, self.eps, self.width, self.gate, gate_first=self.gate_first)


class SpanningNorm(GatedNorm):
    """A gated norm over a group of channels that neighbouring tensor-parallel ranks share. ``channels`` are the rank's."""

    group: Group = ALONE

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(z.float()) if self.gate == "sigmoid" else nn.functional.silu(z.float())
        ranks = self.width // len(self.weight)
        if self.gate_first:
            x = x * gate
        first = self.group.rank // ranks * ranks
        squares = self.group.all_gather(x.square().sum(1, keepdim=True))[first : first + ranks]
        normed = x * torch.rsqrt(ordered_sum(squares) / self.width + self.eps) * self.weight.float()
        return (normed if self.gate_first else normed * gate).to(z.dtype)


class GatedDeltaNet(StateMixer):
    """The gated delta rule between its projections. Names are those of Qwen3.5."""

    outputs: ClassVar = {
        "in_proj": ("keys", "keys", "values", "values"),
        "gate_proj": ("heads", "heads"),
        "conv1d": ("keys", "keys", "values"),
        "A_log": ("heads",),
        "dt_bias": ("heads",),
    }

    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec, hidden = spec, model.hidden_size
        values = spec.heads * spec.value_dim
        self.in_proj = FusedLinear(hidden, self.input_parts(spec), dtype=dtype, device=device)
        self.in_proj.stored_rows = self.input_rows(spec)
        self.gate_proj = FusedLinear(hidden, self.gate_parts(spec), dtype=dtype, device=device)
        self.gate_proj.stored_rows = self.gate_rows(spec)
        self.conv1d = _conv(spec, dtype, device)
        self.A_log = _vector(spec.heads, torch.float32, device)
        self.dt_bias = _vector(spec.heads, torch.float32, device)
        self.norm = GatedNorm(spec.value_dim, self.norm_eps(model), width=spec.value_dim, dtype=dtype, device=device)
        self.out_proj = RowParallelLinear(values, hidden, dtype=dtype, device=device)

    def input_parts(self, spec: StateSpec) -> dict[str, int]:
        """The matrices whose outputs are q, k, v and z, each of all heads."""
        return {"in_proj_qkv": spec.mixed_channels, "in_proj_z": spec.heads * spec.value_dim}

    def gate_parts(self, spec: StateSpec) -> dict[str, int]:
        """The matrices whose outputs are beta and the decay of all heads."""
        return {"in_proj_b": spec.heads, "in_proj_a": spec.heads}

    def input_rows(self, spec: StateSpec) -> Mapping[str, Callable[[], Sequence[int]]]:
        """``stored_rows`` of these."""
        return {}

    def gate_rows(self, spec: StateSpec) -> Mapping[str, Callable[[], Sequence[int]]]:
        return {}

    def norm_eps(self, model: ModelSpec) -> float:
        return model.norm_eps

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return self.in_proj, self.gate_proj

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, the rank's part of the sum over tensor-parallel ranks. Positions play no part."""
        spec = self.spec
        rows, cache, state, pending = _state(ctx, spec)
        mixed, gates = multiply_together(x, self.in_proj, self.gate_proj)
        qkv, z = mixed.split_with_sizes((spec.mixed_channels, spec.heads * spec.value_dim), dim=1)
        beta, decay = gates.split_with_sizes((spec.heads, spec.heads), dim=1)
        qkv = causal_conv(qkv, self.conv1d.weight[:, 0], self.conv1d.bias, "silu", cache, rows)
        out = delta_rule(qkv, decay, beta, self.A_log, self.dt_bias, state, rows, spec.beta_factor, pending)
        return self.out_proj(self.norm(out, z))  # type: ignore[no-any-return]


class Mamba2Mixer(StateMixer):
    """Mamba-2 between its projections. Its output is gated and then normed, unless a family says otherwise.

    Args:
        normed: the channels of heads that share B and C are normed together.
        gate_first: the gate is applied before the norm.
        bias, out_bias: of the projections.
    """

    outputs: ClassVar = {
        "in_proj": ("values", "values", "keys", "keys", "heads"),
        "conv1d": ("values", "keys", "keys"),
        "norm": ("values",),
        "A_log": ("heads",),
        "D": ("heads",),
        "dt_bias": ("heads",),
    }

    def __init__(
        self,
        model: ModelSpec,
        spec: StateSpec,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        normed: bool = True,
        gate_first: bool = True,
        bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        super().__init__()
        self.spec, inner = spec, spec.heads * spec.value_dim
        self.widths = [inner, spec.mixed_channels, spec.heads]
        """Widths of the outputs of ``in_proj``: z; x, B and C together; dt."""
        self.in_proj = Linear(model.hidden_size, sum(self.widths), bias=bias, dtype=dtype, device=device)
        self.conv1d = _conv(spec, dtype, device)
        self.A_log = _vector(spec.heads, torch.float32, device)
        self.D = _vector(spec.heads, torch.float32, device)
        self.dt_bias = _vector(spec.heads, torch.float32, device)
        self.norm: GatedNorm | None = None
        if normed:
            whole = model.whole.states[spec.index]
            width = whole.heads * whole.value_dim // whole.key_heads
            kind = GatedNorm if width <= inner else SpanningNorm
            self.norm = kind(inner, model.norm_eps, width=width, gate_first=gate_first, dtype=dtype, device=device)
        self.out_proj = RowParallelLinear(inner, model.hidden_size, bias=out_bias, dtype=dtype, device=device)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.in_proj,)

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, the rank's part of the sum over tensor-parallel ranks. Positions play no part."""
        rows, cache, state, _ = _state(ctx, self.spec)
        z, xbc, dt = self.project(x).split_with_sizes(self.widths, dim=1)
        xbc = causal_conv(xbc, self.conv1d.weight[:, 0], self.conv1d.bias, "silu", cache, rows)
        out = state_space(xbc, dt, self.A_log, self.D, self.dt_bias, state, rows, self.spec.dt_limit)
        if self.norm is None:
            return self.out_proj((out * nn.functional.silu(z.float())).to(z.dtype))  # type: ignore[no-any-return]
        return self.out_proj(self.norm(out, z))  # type: ignore[no-any-return]

    def project(self, x: Activations) -> torch.Tensor:
        """``[T, hidden] -> [T, sum(widths)]``, a new tensor."""
        return self.in_proj(x)  # type: ignore[no-any-return]


def lay_together(model: nn.Module) -> None:
    """Lets each gated delta rule of a loaded model multiply its input once, where its projections are floats."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            lay_behind(module.readers())


def _state(ctx: ForwardContext, spec: StateSpec) -> tuple[StateMetadata, torch.Tensor, torch.Tensor, Pending | None]:
    """Returns the step's rows, and the layer's convolution inputs, its states and the tokens that these lack."""
    rows, own = ctx.state_of(spec.index)
    if own.conv is None or own.state is None:
        raise ValueError(f"state layer {spec.index} keeps no convolution's inputs, or no state")
    return rows, own.conv, own.state, own.pending


def _conv(spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> CausalConv:
    if spec.conv is None:
        raise ValueError(f"state layer {spec.index} has no convolution")
    return CausalConv(spec.conv.channels, spec.conv.width, bias=spec.conv.bias, dtype=dtype, device=device)
