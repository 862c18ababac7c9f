"""Products with experts in number formats against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.moe import reference as ref
from headrace.kernels.moe import triton_experts as moe
from headrace.kernels.moe import triton_rounding as rounding
from headrace.kernels.moe.tiling import MoeTiling
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec

from .coded import CASES, Case, exact, moved, random_codes

SPEC = MoeSpec(num_experts=5, top_k=2, intermediate_size=128)
SWAPPED, STRAIGHT = MoeTiling(16, 64, 128, 4, 3, swap=True), MoeTiling(16, 128, 256, 4, 2)
SLOW = ("int4-minima", "int4-48", "int8-32", "int8-16", "int8-all", "int8-minima-all")
"""Formats whose code others take too."""
ONE_TOKEN = ("fp8-channel", "fp8-blocks", "mxfp4", "int4-64")
"""A format of each codec and way to round that one token is tested with."""


def check(
    case: Case, spec: MoeSpec, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, **options: object
) -> torch.Tensor:
    torch.manual_seed(tokens)
    count, inner, first = spec.num_held, spec.intermediate_size, spec.first_outputs
    gate_up, down = random_codes(case, count, first, hidden), random_codes(case, count, hidden, inner)
    experts = torch.rand(tokens, count).topk(spec.top_k).indices.int()
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, spec.top_k)
    biases = (torch.randn(count, first).to(dtype), torch.randn(count, hidden).to(dtype)) if spec.bias else (None, None)
    expected = exact(x, experts, weights, gate_up, down, spec, biases)
    plain = ref.moe_mlp(x, experts, weights, gate_up, down, spec, *biases)
    got = moe.moe_mlp(
        x.to(device), experts.to(device), weights.to(device), moved(gate_up, device), moved(down, device), spec,
        *(None if bias is None else bias.to(device) for bias in biases), **options,
    ).cpu()  # fmt: skip
    # A sum near the middle between two numbers of e4m3 is rounded to either: a few of many inputs are a step apart.
    relative = 2e-2 if case.rounded != "none" else 4e-6
    relative = max(relative, 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9 if dtype == torch.float16 else 0)
    for one in (got, plain):
        assert one.dtype == dtype
        error = (one.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert float(error) <= relative, float(error)
    return got


@pytest.mark.parametrize("several", [1, 4])
@pytest.mark.parametrize("name", ["fp8-channel", "fp8-blocks", "w4afp8"])
def test_rows_are_rounded_as_the_reference_rounds(
    name: str, several: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group for each program or several, and a last group that is short."""
    monkeypatch.setattr(rounding, "_SPREAD", 0 if several > 1 else 1000)
    monkeypatch.setattr(rounding, "_ROUNDED", 1024)
    codes = random_codes(CASES[name], 1, 128, 160)
    wide = torch.full((7, 180), torch.nan)
    wide[:, 10:-10] = torch.randn(7, 160) * torch.logspace(-2, 2, 7)[:, None]
    wide[2] = 0
    expected = codes.round_rows(wide[:, 10:-10])
    held, scales = rounding.round_rows(wide.to(device)[:, 10:-10], moved(codes, device))
    factors = scales.cpu().t() if codes.x_scale is None else scales.cpu()[None]
    factors = factors.repeat_interleave(-(-160 // factors.shape[1]) if factors.shape[1] == 1 else 128, 1)[:, :160]
    assert torch.equal(held.cpu().view(torch.float8_e4m3fn).float() * factors, expected)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *(pytest.param(name, 9, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES),
        *(pytest.param(name, 1, marks=() if name in ONE_TOKEN else pytest.mark.slow) for name in CASES),
    ],
)
def test_formats(name: str, tokens: int, device: torch.device) -> None:
    check(CASES[name], SPEC, tokens, 256, torch.float32, device)


@pytest.mark.parametrize(
    ("name", "tiling"),
    [
        *(("fp8-blocks", SWAPPED), ("fp8-blocks", STRAIGHT), ("mxfp4", SWAPPED), ("int4-128", STRAIGHT), ("w4afp8", STRAIGHT)),
        *(
            pytest.param(name, tiling, marks=pytest.mark.slow)
            for name, tiling in (("mxfp4", STRAIGHT), ("int4-128", SWAPPED), ("w4afp8", SWAPPED))
        ),
        *(pytest.param("fp8-channel", tiling, marks=pytest.mark.slow) for tiling in (SWAPPED, STRAIGHT)),
    ],
)
def test_either_order_of_factors(name: str, tiling: MoeTiling, device: torch.device) -> None:
    """Whether the first product's tiles round what they make, or a kernel of its own does."""
    check(CASES[name], SPEC, 7, 384, torch.float16, device, tiling=tiling)


FETCHED = MoeTiling(16, 64, 128, 4, 2, fetch=True)


@pytest.mark.parametrize("swap", [False, True], ids=["straight", "swapped"])
@pytest.mark.parametrize("name", ["fp8-channel", "fp8-blocks"])
def test_codes_that_are_fetched(name: str, swap: bool, device: torch.device) -> None:
    check(CASES[name], SPEC, 9, 256, torch.float32, device, tiling=dataclasses.replace(FETCHED, swap=swap))


@pytest.mark.parametrize("name", ["fp8-half-blocks", "mxfp4", "int4-32"])
def test_sizes_that_tiles_do_not_divide(name: str, device: torch.device) -> None:
    """gpt-oss has such sizes: 2880 is not a multiple of 128, and half of it is not a multiple of 64."""
    spec = MoeSpec(num_experts=3, top_k=2, intermediate_size=192 if "fp8" in name else 96, act=CLAMPED_SWIGLU, bias=True)
    check(CASES[name], spec, 5, 320 if "fp8" in name else 160, torch.float32, device)


@pytest.mark.parametrize("name", ["fp8-blocks", "int4-128"])
def test_experts_without_gates(name: str, device: torch.device) -> None:
    check(CASES[name], dataclasses.replace(SPEC, act="relu2", gated=False), 5, 256, torch.float32, device)


def test_rows_of_zeros_and_experts_of_other_ranks(device: torch.device) -> None:
    spec = dataclasses.replace(SPEC, held=(0, 5), num_experts=9)
    case = CASES["fp8-blocks"]
    gate_up, down = random_codes(case, 5, 256, 256), random_codes(case, 5, 256, 128)
    x, weights = torch.randn(4, 256), torch.rand(4, 2)
    x[1] = 0
    experts = torch.tensor([[0, 5], [3, 4], [5, 5], [2, 0]], dtype=torch.int32)
    got = moe.moe_mlp(
        x.to(device), experts.to(device), weights.to(device), moved(gate_up, device), moved(down, device), spec
    ).cpu()
    expected = ref.moe_mlp(x, experts, weights, gate_up, down, spec)
    assert not got[1:3].any()
    assert float((got - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize(
    "name",
    ["fp8-blocks", "mxfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8-channel", "w4afp8", "int8-16"))],
)
def test_tokens_do_not_depend_on_others(name: str, device: torch.device) -> None:
    """Bitwise, in batch-invariant mode."""
    torch.manual_seed(0)
    case = CASES[name]
    gate_up, down = (moved(random_codes(case, 5, *size), device) for size in ((256, 256), (256, 128)))
    x, weights = torch.randn(24, 256).half().to(device), torch.rand(24, 2).to(device)
    experts = torch.rand(24, 5).topk(2).indices.int().to(device)
    whole = moe.moe_mlp(x, experts, weights, gate_up, down, SPEC, batch_invariant=True)
    for some in (slice(0, 1), slice(3, 20)):
        alone = moe.moe_mlp(x[some], experts[some], weights[some], gate_up, down, SPEC, batch_invariant=True)
        assert torch.equal(alone, whole[some])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 200])
@pytest.mark.parametrize("name", CASES)
def test_matrix_units(name: str, tokens: int, dtype: torch.dtype) -> None:
    spec = MoeSpec(num_experts=6, top_k=3, intermediate_size=384)
    check(CASES[name], spec, tokens, 512, dtype, torch.device("cuda"))
    check(CASES[name], spec, tokens, 512, dtype, torch.device("cuda"), batch_invariant=True)
