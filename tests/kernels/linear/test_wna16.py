"""Packed integers: the order of their words, and the weights that they are."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.wna16 import wna16_linear
from headrace.kernels.linear.wna16_reference import dequantize, pack, unpack

from .packed import packed_weight


@pytest.mark.parametrize("shape", [(8, 128), (17, 200), (3, 16, 256)], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 128)])
def test_codes_come_back(bits: int, group: int, shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = pack(codes, bits, group)
    assert words.shape == (*shape[:-2], -(-shape[-2] // 8), -(-shape[-1] // 128), bits // 4, 8, 16)
    assert torch.equal(unpack(words, shape[-2], shape[-1], group), codes)


def test_a_thread_has_neighbours_that_one_mask_makes_pairs() -> None:
    codes = torch.arange(8 * 128, dtype=torch.int32).remainder(16).to(torch.uint8).view(8, 128)
    # Output 5, second thread of four, third word: inputs 64 + 8 to 64 + 15, or of each 32 inputs 8 + 4 and 8 + 5.
    for group, expected in (64, [8, 10, 12, 14]), (128, [12, 12, 12, 12]):
        word = int(pack(codes, 4, group)[0, 0, 0][5, 4 * 1 + 2])
        pairs = [(word >> (4 * place)) & 0x000F000F for place in range(4)]
        assert [(pair & 15, pair >> 16) for pair in pairs] == [(code, code + 1) for code in expected]


@pytest.mark.parametrize("middles", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (8, 256)])
def test_weights(bits: int, group: int, middles: bool) -> None:
    weight, exact = packed_weight(24, 200, bits, group, middles=middles)
    assert (weight.bits, weight.outputs) == (bits, 24)
    assert torch.equal(dequantize(weight), exact)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_product_is_rounded_once(rows: int) -> None:
    weight, exact = packed_weight(24, 200, 4, 64, middles=True)
    x, bias = torch.randn(rows, 200).bfloat16(), torch.randn(24)
    y = wna16_linear(x, weight, bias)
    expected = x.double() @ exact.double().t() + bias.double()
    assert y.shape == (rows, 24) and y.dtype == torch.bfloat16
    assert bool(((y.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all())
    torch.testing.assert_close(wna16_linear(x, weight, bias, torch.float32).double(), expected, rtol=1e-5, atol=1e-5)
