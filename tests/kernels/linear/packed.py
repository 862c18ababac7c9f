"""Weights of 4 and 8 bits, with the floats that they are by a definition of their own."""

from __future__ import annotations

import torch

from headrace.kernels.linear.wna16_reference import MAX_TILES, PackedWeight, pack


def packed_weight(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    *,
    middles: bool = False,
    scales: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> tuple[PackedWeight, torch.Tensor]:
    """Returns random codes with integer zero points (``middles``) or without, and ``[outputs, inputs]`` float32."""
    generator = torch.Generator().manual_seed(outputs * inputs + bits + group)
    count = -(-inputs // group)
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
    factors = (torch.rand(outputs, count, generator=generator) / 64 + 1e-3).to(scales)
    zeros = torch.full((outputs, count), 2 ** (bits - 1))
    if middles:
        zeros = torch.randint(0, 2**bits, (outputs, count), generator=generator)
    of = torch.tensor([place // group for place in range(inputs)])
    exact = (codes.float() - zeros[:, of].float()) * factors[:, of].float()
    shifts = factors.float() * (2 ** (bits - 1) - zeros).float()
    weight = PackedWeight(
        words=pack(codes, bits, group).to(device),
        scales=factors.t().contiguous().to(device),
        middles=shifts.t().contiguous().to(device) if middles else None,
        group=group,
        inputs=inputs,
        arrived=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
    return weight, exact
