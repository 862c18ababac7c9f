"""Codes of 4 and 8 bits: decoded from GGUF number for number, or rounded from floats within half a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quant_blocks import HALVES, Type, random_blocks

from headrace.quant import int4, native
from headrace.quant.formats.gguf import SPECS
from headrace.quant.gguf_blocks import decode
from headrace.quant.groups import GROUP, GroupCodes, concatenate, relative_error, round_to_groups

GROUPED = [Type[name] for name in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0")]


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_are_what_gguf_says(kind: Type) -> None:
    blocks, spec = random_blocks(kind, rows=6, columns=512), SPECS[kind.name]
    weights = decode(blocks, kind)
    assert weights is not None
    assert np.array_equal(weights.dequantize().float().numpy(), dequantize(blocks, kind))
    if isinstance(weights, GroupCodes):
        assert spec.codes == f"int{weights.bits}" and spec.group == (1, weights.group)
        assert weights.codes.dtype == torch.uint8
        assert int(weights.codes.max()) < 2**weights.bits
        assert (spec.zero == "none") == torch.equal(weights.mins, -(2 ** (weights.bits - 1)) * weights.scales)
    else:
        assert spec.codes == "mxfp4"


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_what_gguf_rounds(kind: Type) -> None:
    floats = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
    blocks = quantize(floats, kind)
    weights = decode(blocks, kind)
    assert weights is not None
    assert np.array_equal(weights.dequantize().numpy(), dequantize(blocks, kind))


@pytest.mark.parametrize("kind", GROUPED, ids=lambda kind: kind.name)
def test_what_each_kernel_makes_of_it(kind: Type) -> None:
    """Half precision is exact for all but K blocks; bfloat16 costs some thousandths."""
    weights = decode(random_blocks(kind, rows=32, columns=512), kind)
    assert isinstance(weights, GroupCodes)
    exact = weights.dequantize()
    error = relative_error(native.held(weights).dequantize(), exact)
    assert error == 0 if kind not in (Type.Q4_K, Type.Q5_K) else 0 < error < 5e-4
    if weights.bits == 4:
        assert relative_error(int4.held(weights, torch.bfloat16).dequantize(), exact) < 6e-3
        assert relative_error(int4.held(weights, torch.float32).dequantize(), exact) < 1e-6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([4, 8]),
    step=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    middle=st.booleans(),
    spread=st.sampled_from([0.0, 0.02, 1.0]),
    shift=st.sampled_from([0.0, -0.5, 0.03]),
    seed=st.integers(0, 99),
)
def test_rounding(bits: int, step: torch.dtype, middle: bool, spread: float, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = shift + spread * torch.randn(5, 96, generator=generator)
    anchor = 2 ** (bits - 1) if middle else 0
    weights = round_to_groups(weight, bits, step, anchor)
    assert weights.codes.shape == weight.shape
    fixed = weights.mins + anchor * weights.scales
    assert torch.equal(weights.scales, weights.scales.to(step).float())
    torch.testing.assert_close(fixed, fixed.to(step).float(), rtol=1e-6, atol=1e-7)
    # Half a step; and at the ends of the range what rounding scale and anchor took from it.
    eps = torch.finfo(step).eps
    bound = 0.5 * weights.scales + eps * (2**bits * weights.scales + fixed.abs()) + 1e-7
    error = (weights.dequantize() - weight).abs().view(5, -1, GROUP).amax(-1)
    assert bool((error <= bound).all())


def test_pieces() -> None:
    first, second = (round_to_groups(torch.randn(rows, 64), 4, torch.float16) for rows in (3, 5))
    whole = concatenate([first, second])
    assert whole.shape == (8, 64)
    assert torch.equal(whole.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    assert torch.equal(whole.rows(slice(3, 8)).dequantize(), second.dequantize())
    assert torch.equal(concatenate([first.widen(), second.widen()]).dequantize(), whole.dequantize())


def test_relative_error() -> None:
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.tensor([1.1, 2.0]), torch.tensor([1.0, 2.0])) == pytest.approx(0.1 / 5**0.5, rel=1e-5)
    assert isinstance(GroupCodes(4, *torch.zeros(3, 1, 1)).shape, tuple)


@pytest.mark.parametrize("group", [32, 64, 96])
def test_zero_points_and_wider_groups_are_regrouped(group: int) -> None:
    """Each group of 32 gets a scale and a zero point of its own."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (5, 192), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.rand(5, 192 // group).half(), torch.randint(0, 16, (5, 192 // group), dtype=torch.uint8)
    wide = GroupCodes(4, codes, scales, zeros, group)
    exact = (codes.float() - zeros.float().repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    assert torch.equal(wide.dequantize(), exact)
    narrow = wide.regroup()
    assert narrow is not None
    assert narrow.scales.shape == (5, 6)
    assert narrow.zeros is not None
    assert torch.equal(narrow.dequantize(), exact)
    assert narrow.regroup() is narrow


def test_what_groups_of_32_cannot_hold() -> None:
    codes, one = torch.zeros(2, 96, dtype=torch.uint8), torch.ones(2, 1)
    assert GroupCodes(4, codes, one, one, 96).regroup() is not None
    assert GroupCodes(4, codes, torch.ones(2, 2), torch.ones(2, 2), 48).regroup() is None
    assert GroupCodes(4, codes[:, :40], one, one, 40).regroup() is None
    assert GroupCodes(4, codes, torch.ones(2, 3), torch.ones(2, 3), 32, torch.arange(96) % 3).regroup() is None


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("form", ["even", "one group", "the last is cut", "any order", "transposed", "a rank's inputs"])
def test_weights_are_scales_and_offsets_of_each_inputs_group(form: str, zeros: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, group, columns = 6, 32, 80 if form == "the last is cut" else 96
    group = columns if form == "one group" else group
    count = -(-columns // group)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, count, generator=generator).half()
    offsets = torch.randint(0, 16, (rows, count), dtype=torch.uint8, generator=generator)
    order = torch.randperm(columns, generator=generator) // group if form == "any order" else None
    if form == "transposed":
        codes = codes.t().contiguous().t()
    if form == "a rank's inputs":
        codes = torch.cat((codes, codes), 1)[:, :columns]
    weights = GroupCodes(4, codes, scales, offsets if zeros else offsets.float(), group, order)
    of = torch.arange(columns) // group if order is None else order
    scale, offset = scales.float()[:, of], offsets.float()[:, of]
    wanted = scale * (codes.float() - offset) if zeros else scale * codes.float() + offset
    assert torch.equal(weights.dequantize(), wanted) and weights.dequantize().is_contiguous()
