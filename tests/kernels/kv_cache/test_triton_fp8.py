"""e4m3 by integers alone, as devices before SM89 have it: every number, and everything between."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache import reference as ref
from headrace.kernels.kv_cache import triton_fp8 as fp8

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@triton.jit
def _convert(x, stored, back, COUNT: tl.constexpr, MODE: tl.constexpr):
    place = tl.arange(0, COUNT)
    small = fp8.from_float(tl.load(x + place), MODE)
    tl.store(stored + place, small)
    tl.store(back + place, fp8.to_half(small, MODE).to(tl.float32) * fp8.gain(MODE))


@triton.jit
def _quantize(x, stored, scales, ROWS: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    wide = tl.load(x + place)
    scale = fp8.scale_of(wide, 1)
    tl.store(scales + tl.arange(0, ROWS), scale)
    tl.store(stored + place, fp8.quantized(wide, tl.broadcast_to(scale[:, None], wide.shape), MODE))


def numbers() -> torch.Tensor:
    """All e4m3 numbers, the middles between neighbours (ties) with what is just beside them, and random ones."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(middle, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    random = 448 * torch.rand(2000, generator=torch.Generator().manual_seed(0)).pow(6)
    every = torch.cat((exact, -exact, middle, *beside, random, -random, torch.tensor([torch.nan, 1e-30, -1e-40])))
    return torch.nn.functional.pad(every, (0, 4096 - len(every)))


def modes(device: torch.device) -> set[int]:
    return {fp8.BITS, fp8.mode(device)}


def test_every_number(device: torch.device) -> None:
    x = numbers()
    expected = x.to(torch.float8_e4m3fn)
    for mode in modes(device):
        stored, back = torch.empty(4096, dtype=torch.uint8, device=device), torch.empty(4096, device=device)
        _convert[(1,)](x.to(device), stored, back, COUNT=4096, MODE=mode)
        got = stored.cpu().view(torch.float8_e4m3fn).float()
        assert torch.equal(got.nan_to_num(999), expected.float().nan_to_num(999))
        there = ~x.isnan()
        assert torch.equal(back.cpu()[there], expected.float()[there])


def test_quantised_like_the_reference(device: torch.device) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-14, 6, 16).unsqueeze(1)
    x[0] = 0
    x[3, 5] = torch.nan
    expected, scales = ref.quantize(x)
    for mode in modes(device):
        stored = torch.empty(16, 64, dtype=torch.uint8, device=device)
        got_scales = torch.empty(16, device=device)
        _quantize[(1,)](x.to(device), stored, got_scales, ROWS=16, WIDTH=64, MODE=mode)
        assert torch.equal(got_scales.cpu().nan_to_num(-1), scales.nan_to_num(-1))
        assert scales[3].isnan() and scales[0] == ref.FP8_MIN_SCALE
        whole = ~x.isnan().any(1)
        got = stored.cpu().view(torch.float8_e4m3fn)
        assert torch.equal(got[whole].float(), expected[whole].float())
        restored = ref.dequantize(got, got_scales.cpu())[whole]
        # Half a step of three mantissa bits; below the normal numbers, half of 2 ** -9.
        bound = torch.maximum(x[whole].abs() / 16, scales[whole].unsqueeze(1) * 2.0**-10)
        assert ((restored - x[whole]).abs() <= 1.001 * bound).all()
