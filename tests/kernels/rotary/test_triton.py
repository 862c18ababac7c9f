"""Rotation of whole heads in place against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.rotary.reference import rotate_ref
from headrace.kernels.rotary.triton import rotate_heads
from kernels.closeness import STEP, close


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 80), (1, 6, 2), (5, 3, 72), (0, 2, 8)], ids=str)
def test_matches_the_ref(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    tokens, heads, width = shape
    qkv = torch.randn(tokens, 3, heads, width).to(dtype)
    angles = torch.randn(tokens, width // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat((cos[:, : width // 2], sin[:, : width // 2]), dim=1)
    expected, _ = rotate_ref(qkv[:, :2].flatten(1, 2), qkv[:, 2], both, width)
    given = qkv.to(device)
    rotate_heads(given[:, :2].flatten(1, 2), cos.to(device), sin.to(device))
    close(given[:, :2].flatten(1, 2), expected, steps=1)
    assert torch.equal(given[:, 2].cpu(), qkv[:, 2]), "values stay as they are"


def test_other_layouts_are_refused() -> None:
    x, angles = torch.zeros(2, 4, 8), torch.zeros(2, 8)
    for wrong in (x.transpose(0, 1), torch.zeros(2, 4, 7)):
        with pytest.raises(ValueError, match="cannot be rotated"):
            rotate_heads(wrong, angles, angles)
