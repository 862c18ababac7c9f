"""RMS norms against their references, over odd widths, strides and types."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.kernels import norm as ref
from headrace.kernels.linear.triton_fp8 import quantize_rows
from headrace.kernels.norm import triton as norm
from headrace.kernels.norm.reference import rms_norm_ref
from kernels.closeness import STEP, close

EPS = 1e-6


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 40), (2, 1000), (5, 3, 80), (0, 64), (2, 1)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    got = norm.rms_norm(x.to(device), weight.to(device), EPS)
    assert got.dtype == dtype
    # Rounded once before the weight and once after it.
    close(got, ref.rms_norm(x, weight, EPS), steps=2)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 40), (2, 1000), (0, 64)], ids=str)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    normed, total = norm.add_rms_norm(x.to(device), residual.to(device), weight.to(device), EPS)
    expected, expected_total = ref.add_rms_norm(x, residual, weight, EPS)
    close(normed, expected, steps=2)
    close(total, expected_total, steps=0 if dtype != torch.bfloat16 else 1)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 40), (2, 1000), (5, 3, 80), (0, 64)], ids=str)
def test_weights_less_one(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), (0.2 * torch.randn(shape[-1])).to(dtype)
    got = norm.rms_norm(x.to(device), weight.to(device), EPS, offset=True)
    close(got, ref.rms_norm(x, weight, EPS, offset=True), steps=1)
    if len(shape) == 2:
        residual = torch.randn(shape).to(dtype)
        normed, total = norm.add_rms_norm(x.to(device), residual.to(device), weight.to(device), EPS, offset=True)
        expected, expected_total = ref.add_rms_norm(x, residual, weight, EPS, offset=True)
        close(total, expected_total, steps=0 if dtype != torch.bfloat16 else 1)
        # Of the same sum: the sums may be a step apart.
        close(normed, ref.rms_norm(total.cpu(), weight, EPS, offset=True), steps=1)
        assert expected.shape == normed.shape


@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 40), (2, 1000), (5, 3, 80), (0, 64), (2, 1)], ids=str)
def test_a_norm_on_either_side_of_a_sum(shape: tuple[int, ...], dtype: torch.dtype, offset: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    first, weight = (0.2 * torch.randn(2, shape[-1])).to(dtype)
    normed, total = norm.add_rms_norm(
        x.to(device), residual.to(device), weight.to(device), EPS, first=(first.to(device), 1e-2), offset=offset
    )
    expected = rms_norm_ref(x, first, 1e-2, offset=offset) + residual
    assert normed.dtype == total.dtype == dtype
    # Rounded twice before the sum, and then the sum: two that cancel leave steps of theirs.
    size = expected.abs().max().item() if expected.numel() else 0.0
    steps = 4 * STEP[dtype] * (3 if dtype == torch.bfloat16 and device.type == "cpu" else 1)
    torch.testing.assert_close(total.cpu(), expected, rtol=steps, atol=steps * size / 4)
    # Of the same sum: the sums may be a step apart.
    close(normed, rms_norm_ref(total.cpu(), weight, EPS, offset=offset), steps=2)


@pytest.mark.parametrize("group", [None, 128], ids=["row", "blocks"])
@pytest.mark.parametrize("way", ["plain", "sum", "offset", "first"])
@pytest.mark.parametrize("shape", [(1, 128), (3, 640), (2, 1024), (0, 256)], ids=str)
def test_rounded_in_the_same_kernel(shape: tuple[int, int], way: str, group: int | None, device: torch.device) -> None:
    """Codes and scales are those of the norm that is rounded behind it, bit for bit."""
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).bfloat16().to(device) for _ in range(2))
    first, weight = (0.2 * torch.randn(2, shape[-1])).bfloat16().to(device)
    options: dict[str, Any] = {"offset": way == "offset"}
    if way == "plain":
        normed, total = norm.rms_norm(x, weight, EPS), x
    else:
        options |= {"first": (first, 1e-2)} if way == "first" else {}
        normed, total = norm.add_rms_norm(x, residual, weight, EPS, **options)
    got, added = norm.rounded_rms_norm(x, None if way == "plain" else residual, weight, EPS, group or shape[-1], **options)
    expected = quantize_rows(normed, group or shape[-1])
    assert torch.equal(added, total)
    assert (got.rows, got.dtype) == (shape[0], x.dtype)
    assert torch.equal(got.scales[: got.rows], expected.scales[: got.rows])
    assert torch.equal(got.codes[: got.rows].view(torch.uint8), expected.codes[: got.rows].view(torch.uint8))


def test_rows_within_wider_ones(device: torch.device) -> None:
    """Heads of a fused projection: what is beside them is neither read nor written."""
    packed = torch.full((4, 3 * 48 + 7), torch.nan)
    packed[:, 5 : 5 + 96] = torch.randn(4, 96)
    heads = packed.to(device)[:, 5 : 5 + 96].unflatten(1, (2, 48))
    weight = torch.randn(48)
    close(norm.rms_norm(heads, weight.to(device), EPS), ref.rms_norm(packed[:, 5:101].unflatten(1, (2, 48)), weight, EPS))
    flat = packed.to(device)[:, 5 : 5 + 48]
    residual = torch.randn(48, 4).T
    got = norm.add_rms_norm(flat, residual.contiguous().to(device), weight.to(device), EPS)
    close(got[0], ref.add_rms_norm(packed[:, 5:53], residual.contiguous(), weight, EPS)[0])


def test_extremes(device: torch.device) -> None:
    """Zeros stay zeros; squares of the largest bfloat16 numbers a model has do not overflow; NaN stays in its row."""
    x = torch.zeros(3, 64)
    x[1] = 1e15
    x[2, 7] = torch.nan
    got = norm.rms_norm(x.to(device), torch.ones(64, device=device), EPS).cpu()
    assert torch.equal(got[0], torch.zeros(64))
    torch.testing.assert_close(got[1], torch.ones(64))
    assert got[2].isnan().all()


def test_refusals(device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, torch.ones(7, device=device), EPS)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, torch.ones(8, dtype=torch.float16, device=device), EPS)
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        norm.add_rms_norm(x, x, torch.ones(8, device=device), EPS, first=(torch.ones(7, device=device), EPS))
    with pytest.raises(ValueError, match="residual"):
        norm.add_rms_norm(x, x[:3], torch.ones(8, device=device), EPS)
    with pytest.raises(ValueError, match="contiguous"):
        norm.rms_norm(x.T, torch.ones(4, device=device), EPS)
