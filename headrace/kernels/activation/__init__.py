"""Gated activations of an MLP whose gate and up projections are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu
from headrace.kernels.activation import native, reference
from headrace.kernels.activation.reference import clamped_swiglu, gelu_mul, squared_relu
from headrace.kernels.linear.fp8 import round_rows
from headrace.kernels.linear.fp8_reference import Activations

if TYPE_CHECKING:
    from headrace.kernels.activation import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

__all__ = [
    "ACTIVATIONS",
    "activate",
    "clamped_swiglu",
    "gelu_mul",
    "gelu_tanh_mul",
    "sigmoid_gated",
    "silu_mul",
    "squared_relu",
]


silu_mul = gpu.dispatch(reference.silu_mul_ref, "triton", native.silu_mul)
sigmoid_gated = gpu.dispatch(reference.sigmoid_gated)
gelu_tanh_mul = gpu.dispatch(reference.gelu_tanh_mul)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_new": gelu_tanh_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}
"""Hugging Face's name -> ``act(gate) * up`` for ``[..., 2n] -> [..., n]``."""


def activate(act_mul: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor, rounds: int | None) -> Activations:
    """``act_mul(gate_up)``: ``[T, 2n] -> [T, n]``.

    Args:
        rounds: the result is rounded to e4m3 with a scale for each so many channels; None: it is not.
    """
    if rounds is None:
        return act_mul(gate_up)
    if gpu.takes(gate_up) and act_mul in (silu_mul, gelu_tanh_mul):
        return kernels.rounded_gated(gate_up, rounds, gelu=act_mul is gelu_tanh_mul)
    return round_rows(act_mul(gate_up), rounds)
