"""Partial outputs of attention's splits, and their merge: Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023)."""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.attention.tiling import Tiling, partial_size
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin as begin_launch
from headrace.kernels.triton_pdl import options

_MERGED_CHANNELS, _MERGED_SPLITS = 128, 128
"""Channels of one program of the merge, and splits that it reads at a time."""
_MERGED_AT_ONCE = 4096
"""Numbers that a program has in registers."""
_FEW_SPLITS = 16
"""Splits that a warp reads at once, whatever their masses."""


@launched(do_not_specialize=["splits"])
def _merge(
    partial, lse, out, splits, DV: tl.constexpr, BLOCK: tl.constexpr, SPLITS_P: tl.constexpr, AT_ONCE: tl.constexpr,
    ORDERED: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Weighs the splits of one (token, head) by their softmax mass, for a block of channels.

    A split whose mass is 0 may hold anything. A graph has splits for the longest rows there may be, and short ones leave most
    of them empty: those after the last that has a mass are skipped. ``ORDERED``: sums one by one, so that empty
    splits do not change the order of the others. ``FEW``: a thread reads masses and outputs of all splits at once.
    """
    begin_launch(PDL)
    place = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = channel < DV
    if FEW:
        masses, parts = (), ()
        pivot = -float("inf")
        for split in tl.static_range(SPLITS_P):
            at = place * splits + split
            masses += (tl.load(lse + at, mask=split < splits, other=float("-inf")),)
            parts += (tl.load(partial + at * DV + channel, mask=present & (split + 0 * channel < splits), other=0.0),)
            pivot = tl.maximum(pivot, masses[split])
        pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
        merged = tl.zeros([BLOCK], tl.float32)
        total = 0.0
        for split in tl.static_range(SPLITS_P):
            weight = tl.exp2(masses[split] - pivot)
            merged += tl.where(weight > 0.0, weight * parts[split], 0.0)
            total += weight
    else:
        s = tl.arange(0, SPLITS_P)
        mass = tl.load(lse + place * splits + s, mask=s < splits, other=float("-inf"))
        pivot = tl.max(mass, 0)
        pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
        filled = tl.max(tl.where(mass == float("-inf"), 0, s + 1), 0)
        base = partial + place * splits * DV + channel
        merged = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        if ORDERED:
            for split in range(splits):
                # The same number for each channel: blocks of one shape can be masks for each other.
                weight = tl.exp2(tl.load(lse + place * splits + split + 0 * channel) - pivot)
                part = tl.load(base + split * DV, mask=present & (weight > 0.0), other=0.0)
                merged += weight * part
                total += weight
        else:
            for first in range(0, filled, AT_ONCE):
                split = first + tl.arange(0, AT_ONCE)
                weights = tl.exp2(tl.load(lse + place * splits + split, mask=split < splits, other=float("-inf")) - pivot)
                wanted = present[None, :] & (weights > 0.0)[:, None]
                parts = tl.load(base[None, :] + split[:, None] * DV, mask=wanted, other=0.0)
                merged += tl.sum(parts * weights[:, None], 0)
                total += tl.sum(weights, 0)
    merged = merged / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * DV + channel, merged.to(out.dtype.element_ty), mask=present)


def partials(
    tiling: Tiling, num_tokens: int, out: torch.Tensor, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the buffers of the splits' outputs and masses: ``[tokens, H, splits, dv]`` and ``[tokens, H, splits]``, laid
    flat."""
    size = partial_size(tiling, num_tokens, *out.shape[1:])
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=out.device)
    if workspace.numel() < size or workspace.dtype != torch.float32:
        raise ValueError(f"the workspace must hold {size} float32 numbers, not {workspace.numel()} {workspace.dtype}")
    outputs = num_tokens * out.shape[1] * tiling.splits * out.shape[2]
    return workspace[:outputs], workspace[outputs:size]


def merge(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, tiling: Tiling) -> None:
    """Fills ``out [tokens, H, dv]`` from what ``partials`` gave and the splits filled."""
    num_tokens, num_heads, v_head_dim = out.shape
    splits = power_of_two(tiling.splits)
    at_once = min(splits, _MERGED_SPLITS)
    few = splits <= _FEW_SPLITS and not tiling.batch_invariant
    block = min(_MERGED_CHANNELS, power_of_two(v_head_dim), _MERGED_AT_ONCE // at_once)
    _merge[(num_tokens * num_heads, cdiv(v_head_dim, block))](
        partial, lse, out, tiling.splits,
        DV=v_head_dim, BLOCK=block, SPLITS_P=splits, AT_ONCE=at_once, ORDERED=tiling.batch_invariant, FEW=few,
        num_warps=1 if few else 4,
        **options(out.device),
    )  # fmt: skip
