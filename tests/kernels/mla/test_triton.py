"""MLA norm, rotation and cache write against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.mla.reference import norm_rotate_and_cache_mla as norm_rotate_and_cache_mla_ref
from headrace.kernels.mla.triton import norm_rotate_and_cache_mla
from kernels.closeness import STEP, close

SIZES = {"small": (3, 4, 10, 20), "deepseek": (16, 64, 192, 512), "odd": (5, 6, 6, 33), "narrow": (4, 16, 32, 48)}
"""Heads, rotated channels, channels of a head, rank."""


def operands(sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, compressed, weight, cos_sin, rows (NaN all of them); and slots, in any order, some of them none."""
    heads, rotated, width, rank = sizes
    torch.manual_seed(tokens)
    q, compressed = torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, rotated + rank).to(dtype)
    angles = 10 * torch.rand(tokens, rotated // 2)
    rows = torch.full((4, 5, 1, rotated + rank), torch.nan, dtype=dtype)
    slots = torch.randperm(20)[:tokens]
    slots[1::3] = -1
    return [q, compressed, torch.rand(rank).to(dtype), torch.cat((angles.cos(), angles.sin()), 1), rows], slots


def run(function: object, given: list[torch.Tensor], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, compressed, weight, cos_sin, rows = given
    q, rows = q.clone(), rows.clone()
    function(q, compressed, weight, 1e-6, cos_sin, rows, slots)
    return q, rows


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", SIZES)
def test_matches_the_ref(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    given, slots = operands(SIZES[name], tokens, dtype)
    got = run(norm_rotate_and_cache_mla, [tensor.to(device) for tensor in given], slots.to(device))
    expected = run(norm_rotate_and_cache_mla_ref, given, slots)
    written = slots[slots >= 0]
    flat = [rows.cpu().view(20, -1) for rows in (got[1], expected[1])]
    untouched = torch.ones(20, dtype=torch.bool).index_fill_(0, written, False)
    assert flat[0][untouched].isnan().all()
    # A rotated channel is a difference, whose absolute error is that of its terms.
    for one, other in ((got[0].cpu(), expected[0]), (flat[0][written], flat[1][written])):
        torch.testing.assert_close(one, other, atol=8 * STEP[dtype], rtol=4 * STEP[dtype])


def test_a_cache_of_wider_strides_and_parts_of_a_projection(device: torch.device) -> None:
    given, slots = operands(SIZES["small"], 6, torch.float32)
    expected = run(norm_rotate_and_cache_mla_ref, given, slots)
    q, compressed, weight, cos_sin, _ = (tensor.to(device) for tensor in given)
    arena = torch.full((4, 5, 3, 24), torch.nan, device=device)
    projected = torch.full((6, 40), torch.nan, device=device)
    projected[:, 9:33] = compressed
    norm_rotate_and_cache_mla(q, projected[:, 9:33], weight, 1e-6, cos_sin, arena[:, :, 1:2], slots.to(device))
    close(q, expected[0], steps=8)
    assert arena[:, :, ::2].isnan().all()
    kept = slots[slots >= 0]
    close(arena[:, :, 1].cpu().reshape(20, -1)[kept], expected[1].view(20, -1)[kept], steps=8)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_q_may_go_elsewhere(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Its rotated channels do, to the first ones of wider heads; q itself stays as it was."""
    heads, rotated, _, rank = SIZES[name]
    given, slots = operands(SIZES[name], 5, dtype)
    expected, _ = run(norm_rotate_and_cache_mla_ref, given, slots)
    q, compressed, weight, cos_sin, rows = (tensor.to(device, copy=True) for tensor in given)
    for function, where in ((norm_rotate_and_cache_mla, device), (norm_rotate_and_cache_mla_ref, q.device)):
        wide = torch.full((5, heads, rotated + rank), torch.nan, dtype=dtype, device=where)
        function(q, compressed, weight, 1e-6, cos_sin, rows, slots.to(device), wide)
        assert torch.equal(q.cpu(), given[0])
        assert wide[..., rotated:].isnan().all()
        torch.testing.assert_close(
            wide[..., :rotated].cpu(), expected[..., :rotated], atol=8 * STEP[dtype], rtol=4 * STEP[dtype]
        )
