"""Integers for GPUs: what a layer holds of codes and of floats, and how it multiplies."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from support.quant_blocks import HALVES, Type, random_blocks
from support.resolving import HOPPER

from headrace.layers.linear import Linear, make_invariant
from headrace.layers.stored import StoredMatrix
from headrace.parallel.shards import Cut
from headrace.quant import wna16
from headrace.quant.convert import Conversion, Converter
from headrace.quant.formats.gguf import SPECS
from headrace.quant.gguf_blocks import decode
from headrace.quant.groups import GroupCodes, relative_error
from headrace.quant.packed import PackedMethod
from headrace.quant.registry import find
from headrace.quant.wna16 import KEEP_INTEGERS, Int4GpuMethod, Int8GpuMethod, round_symmetric

from .packing import layer_of
from .test_registry import facts

INPUTS = 256


def matrix(outputs: int, seed: int = 0) -> StoredMatrix:
    weight = 0.05 * torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(seed))
    return StoredMatrix("BF16", lambda: weight.bfloat16())


def codes_of(
    outputs: int,
    bits: int = 4,
    group: int = 128,
    *,
    zeros: bool = True,
    scales: torch.dtype = torch.float16,
    order: torch.Tensor | None = None,
    seed: int = 0,
) -> GroupCodes:
    generator = torch.Generator().manual_seed(seed)
    count = -(-INPUTS // group)
    offsets = torch.full((outputs, count), 2 ** (bits - 1), dtype=torch.uint8)
    if zeros:
        offsets = torch.randint(0, 2**bits, (outputs, count), dtype=torch.uint8, generator=generator)
    return GroupCodes(
        bits,
        torch.randint(0, 2**bits, (outputs, INPUTS), dtype=torch.uint8, generator=generator),
        (torch.rand(outputs, count, generator=generator) / 50 + 1e-3).to(scales),
        offsets,
        group,
        order,
    )


def stored(codes: GroupCodes) -> StoredMatrix:
    return StoredMatrix("gptq", codes.dequantize, lambda: codes)


def converted(parts: list[StoredMatrix], quantization: str = "stored") -> tuple[Linear, Conversion]:
    layer = Linear(INPUTS, sum(len(part.exact()) for part in parts), dtype=torch.bfloat16, device="cpu")
    # A CPU runs the reference.
    return layer, Converter(torch.device("cpu"), find(quantization, "cuda")).convert("x", layer, parts)


ORDER = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(3)) // 64
CASES = {
    "zero points": ([codes_of(40), codes_of(24, seed=1)], Int4GpuMethod),
    "parts that end within a block of 8": ([codes_of(12), codes_of(20, seed=1)], Int4GpuMethod),
    "symmetric": ([codes_of(40, zeros=False)], Int4GpuMethod),
    "groups of 16, of 4 and 8 bits": ([codes_of(40, 4, 16), codes_of(24, 8, 16, zeros=False)], Int8GpuMethod),
    "groups of two sizes": ([codes_of(40, group=32), codes_of(24, group=128)], Int4GpuMethod),
    "a group and a whole row": ([codes_of(40, group=64), codes_of(24, group=INPUTS, zeros=False)], Int4GpuMethod),
    "scales of two dtypes": ([codes_of(40), codes_of(24, scales=torch.bfloat16)], Int4GpuMethod),
    "8 bits": ([codes_of(40, 8, 32), codes_of(24, 8, INPUTS)], Int8GpuMethod),
    "4 and 8 bits": ([codes_of(40, 4), codes_of(24, 8)], Int8GpuMethod),
    "another order of inputs": (
        [codes_of(40, group=64, order=ORDER), codes_of(24, group=64, order=ORDER, seed=1)],
        Int4GpuMethod,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_codes_are_kept(name: str) -> None:
    codes, kind = CASES[name]
    exact = torch.cat([each.dequantize() for each in codes])
    layer, done = converted([stored(each) for each in codes])
    assert type(layer.method) is kind and done.error == 0 and "whose numbers are kept" in done.reason
    assert torch.equal(layer.method.dequantize(layer), exact)
    x = torch.randn(5, INPUTS).bfloat16()
    torch.testing.assert_close(layer(x).double(), x.double() @ exact.double().t(), rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_of_gguf_are_kept(kind: Type) -> None:
    codes, spec = decode(random_blocks(kind, 24, INPUTS), kind), SPECS[kind.name]
    assert codes is not None
    exact = codes.dequantize().float()
    layer, done = converted([StoredMatrix(kind.name, lambda: exact, lambda: codes)])
    assert type(layer.method) is (Int4GpuMethod if spec.codes == "int4" else Int8GpuMethod) and done.error == 0
    held = layer.method.dequantize(layer)
    torch.testing.assert_close(held, exact, rtol=0, atol=2.0**-20 * float(exact.abs().max()))
    half = kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
    assert (layer.get_buffer("scales").dtype == torch.float16) == half
    assert ("middles" in dict(layer.named_buffers())) == (spec.zero == "min")


MISFITS = {
    "groups of 8": ([stored(codes_of(24, group=8))], "with such scales"),
    "groups of 96": ([stored(codes_of(24, group=96))], "with such scales"),
    "two orders": (
        [stored(codes_of(24, group=64, order=ORDER)), stored(codes_of(24, group=64, order=ORDER.flip(0)))],
        "orders",
    ),
    "cut groups": ([stored(codes_of(24, group=64, order=ORDER.clamp(max=2)))], "its groups are cut"),
    "codes beside floats": ([stored(codes_of(24)), matrix(24)], "not all of it has codes"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_no_kernel_multiplies_becomes_floats(name: str) -> None:
    parts, reason = MISFITS[name]
    layer, done = converted(parts)
    assert done.format == "floats" and reason in done.reason
    assert torch.equal(layer.weight, torch.cat([part.read().bfloat16() for part in parts]))


@pytest.mark.parametrize(("quantization", "kind"), [("int4", Int4GpuMethod), ("int8", Int8GpuMethod)])
def test_floats_are_rounded_and_the_error_is_reported(quantization: str, kind: type[Int4GpuMethod]) -> None:
    parts = [matrix(40), matrix(24, 1)]
    layer, done = converted(parts, quantization)
    exact = torch.cat([part.read() for part in parts]).float()
    assert type(layer.method) is kind and f"rounded to {quantization}" in done.reason
    assert done.error == pytest.approx(relative_error(layer.method.dequantize(layer), exact), rel=1e-3)
    assert 0 < done.error < (0.11 if quantization == "int4" else 0.01)
    (line,) = layer.method.memory(layer)
    bound = 0.6 if quantization == "int4" else 1.1
    assert line.nbytes - layer.get_buffer("arrived").nbytes < bound * exact.numel()


def test_codes_stay_where_floats_beside_them_are_rounded() -> None:
    codes = codes_of(40)
    layer, done = converted([stored(codes), matrix(24)], "int4")
    assert torch.equal(layer.method.dequantize(layer)[:40], codes.dequantize())
    assert 0 < done.error < 0.11


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_goes_to_the_nearest_and_keeps_the_furthest(bits: int, group: int) -> None:
    weight = torch.randn(24, 256)
    weight[0] = 0
    held = round_symmetric(weight, bits, group, torch.float32).dequantize()
    steps = weight.view(24, -1, group).abs().amax(2) / 2 ** (bits - 1)
    # The number that is furthest on the other side may lack a code.
    assert bool(((held - weight).view(24, -1, group).abs() <= steps[:, :, None] * 1.001).all())
    peaks = weight.view(24, -1, group).abs().amax(2)
    torch.testing.assert_close(held.view(24, -1, group).abs().amax(2), peaks)
    assert relative_error(held, weight) < (0.11 if bits == 4 else 0.01)


@pytest.mark.parametrize("name", CASES)
def test_other_weights_are_rounded_to_the_groups_that_are_there(name: str) -> None:
    layer, _ = converted([stored(each) for each in CASES[name][0]])
    places = {held: buffer.data_ptr() for held, buffer in layer.named_buffers()}
    parts = [matrix(each.shape[0], seed) for seed, each in enumerate(CASES[name][0], 5)]
    cast(PackedMethod, layer.method).rewrite(layer, parts)
    assert {held: buffer.data_ptr() for held, buffer in layer.named_buffers()} == places
    exact = torch.cat([part.read() for part in parts]).float()
    held = layer.method.dequantize(layer)
    assert relative_error(held, exact) < (0.13 if CASES[name][1] is Int4GpuMethod else 0.02)
    x = torch.randn(5, INPUTS).bfloat16()
    torch.testing.assert_close(layer(x).double(), x.double() @ held.double().t(), rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("along", ["outputs", "inputs"])
def test_ranks_hold_their_parts(along: str) -> None:
    whole = codes_of(64, group=64)
    size = 64 if along == "outputs" else INPUTS
    cuts = [Cut(along, start, start + size // 2, size) for start in (0, size // 2)]  # type: ignore[arg-type]
    held = []
    for cut in cuts:
        part = whole.cut(cut)
        layer = Linear(part.shape[1], part.shape[0], dtype=torch.bfloat16, device="cpu")
        method = Int4GpuMethod()
        method.allocate(layer, torch.bfloat16, "cpu")
        assert method.load(layer, [stored(part)]) == 0
        held.append(method.dequantize(layer))
    assert torch.equal(torch.cat(held, 0 if along == "outputs" else 1), whole.dequantize())


def test_bias_dtype_and_shape_of_results() -> None:
    method = Int4GpuMethod()
    layer = layer_of(method, [stored(codes_of(24))], torch.randn(24), torch.bfloat16)
    x = torch.randn(6, INPUTS).bfloat16()
    assert layer(x.view(2, 3, INPUTS)).shape == (2, 3, 24)
    layer.out_dtype = torch.float32
    expected = x.double() @ method.dequantize(layer).double().t() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x).dtype == torch.float32
    make_invariant(layer)
    assert layer.batch_invariant


def test_float32_is_refused() -> None:
    (limit,) = KEEP_INTEGERS.limits(facts(HOPPER, dtype="float32"))
    assert limit.param == "dtype" and "16-bit activations" in limit.reason
    assert not KEEP_INTEGERS.limits(facts(HOPPER, deterministic=True))


def test_a_gated_product_is_one_kernel_where_nothing_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a bias, adapters, another order of inputs or results that must not depend on the batch."""
    called: list[int] = []
    monkeypatch.setattr(wna16, "wna16_gated", lambda x, weight: called.append(len(x)) or x[:, : weight.outputs // 2])
    x = torch.randn(3, INPUTS).bfloat16()
    layer, _ = converted([stored(codes_of(32)), stored(codes_of(32, seed=1))])
    assert layer.gated(x) is not None and called == [3]
    layer.bias = torch.nn.Parameter(torch.zeros(64))
    assert layer.gated(x) is None
    layer.bias, layer.batch_invariant = None, True
    assert layer.gated(x) is None
    ordered, _ = converted([stored(codes_of(32, group=64, order=ORDER))])
    assert ordered.gated(x) is None and called == [3]
