"""Layers with a state: causal convolutions and linear recurrences over packed rows, with the state of each row in a block.

Rows and their blocks are those of a ``StateMetadata``. All functions update the blocks in place, and give zeros for padding
rows. On a CPU results are bitwise the same however a sequence is cut into steps, and whatever other rows there are.
"""

from __future__ import annotations

import torch

from headrace.kernels import gpu
from headrace.kernels.state import native, reference
from headrace.kernels.state.metadata import Pending, StateMetadata, StateRow
from headrace.kernels.state.reference import Gate

__all__ = [
    "Gate",
    "Pending",
    "StateMetadata",
    "StateRow",
    "causal_conv",
    "delta_rule",
    "gated_conv",
    "gated_norm",
    "selective_scan",
    "state_space",
]


causal_conv = gpu.dispatch(reference.causal_conv_ref, "triton", native.causal_conv)


def gated_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: torch.Tensor, step: StateMetadata
) -> torch.Tensor:
    """A causal convolution between two gates: ``c * causal_conv(b * v)``, where x has b, c and v, of C channels each.

    Args:
        x: ``[T, 3 * C]``; the rest as in ``causal_conv``.

    Returns:
        ``[T, C]`` in x's dtype.
    """
    if (found := native.gated_conv(x, weight, bias, cache, step)) is not None:
        return found
    gate, out_gate, values = x.chunk(3, dim=-1)
    return out_gate * causal_conv(gate * values, weight, bias, None, cache, step)


delta_rule = gpu.dispatch(reference.delta_rule_ref, "triton", native.delta_rule)
state_space = gpu.dispatch(reference.state_space_ref, "triton", native.state_space)
selective_scan = gpu.dispatch(reference.selective_scan_ref, "triton_scan", native.selective_scan)
gated_norm = gpu.dispatch(reference.gated_norm_ref, "triton", native.gated_norm)
