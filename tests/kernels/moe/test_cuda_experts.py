"""Experts' products by the kernel in CUDA C++."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.moe import cuda_experts, triton_sort
from headrace.kernels.moe import reference as ref
from headrace.kernels.moe import triton_experts as moe
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.cuda_experts import BlockSizes, taken
from headrace.kernels.moe.triton_sort import Routing
from headrace.model_spec import MoeSpec

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, HIDDEN, INNER = torch.bfloat16, 512, 256
SPEC = MoeSpec(num_experts=32, top_k=4, intermediate_size=INNER)


def codes(outputs: int, inputs: int, device: str = "cpu") -> ExpertCodes:
    torch.manual_seed(outputs)
    shape = SPEC.num_experts, outputs, inputs
    weight = torch.randn(shape, device=device) * inputs**-0.5
    scales = weight.abs().amax(2, keepdim=True) / 448
    held = (weight / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return ExpertCodes("e4m3", shape, held, scales.transpose(1, 2).contiguous(), (1, inputs), x_group=inputs)


def sorted_choices(tokens: int, rows: int) -> Routing:
    experts = torch.randint(0, SPEC.num_experts, (tokens, SPEC.top_k), dtype=torch.int32)
    order = experts.flatten().argsort(stable=True).int()
    table = torch.zeros(tokens * SPEC.top_k, 4, dtype=torch.int32)
    return Routing(experts.numel(), SPEC.num_experts, True, order, order, table, rows)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_kernels_compile(dtype: torch.dtype, nvrtc: None) -> None:
    sizes = [*cuda_experts._SINGLE, *cuda_experts._SOME, *cuda_experts._MANY]
    for (rows, first, tabled), size in zip(
        itertools.product((8, 16, 32), (True, False), (True, False)), itertools.cycle(sizes), strict=False
    ):
        kernel = cuda_experts._kernel.__wrapped__(first, tabled, dtype, rows, size, 4, 32)
        assert kernel.binary().startswith(b"\x7fELF")


def test_sizes_fit_side_by_side() -> None:
    """Shared memory of a multiprocessor of Hopper: 228 KB, of which a block takes 1 KB more than it asks for."""
    for size, rows in itertools.product([*cuda_experts._SINGLE, *cuda_experts._SOME, *cuda_experts._MANY], (8, 16, 32)):
        assert size.stages(rows) >= 2 and (216 // size.kilobytes) * (size.shared(rows) + 1024) <= 228 << 10


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in FP8, with scales of whole rows."""
    monkeypatch.setattr(cuda_experts, "refusals", lambda device: ())
    first, second = codes(2 * INNER, HIDDEN), codes(HIDDEN, INNER)
    some = sorted_choices(8, 16)
    alone = dataclasses.replace(some, in_order=False, table=None, table_tokens=0)
    assert taken(first, second, SPEC, some, BF16) and taken(first, second, SPEC, alone, BF16)
    assert not taken(first.codes.to(BF16), second.codes.to(BF16), SPEC, some, BF16)
    assert not taken(first, second, SPEC, dataclasses.replace(some, table_tokens=64), BF16)
    assert not taken(first, second, SPEC, some, torch.float32)
    assert not taken(first, second, dataclasses.replace(SPEC, act="gelu"), some, BF16)
    assert not taken(dataclasses.replace(first, x_group=128), second, SPEC, some, BF16)
    assert not taken(first, dataclasses.replace(second, group=(128, 128)), SPEC, some, BF16)
    monkeypatch.setattr(cuda_experts, "refusals", lambda device: ("it is no Hopper",))
    assert not taken(first, second, SPEC, some, BF16)


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_experts, "tensor_map", lambda x, height, width: (tuple(x.shape), height, width))
    monkeypatch.setattr(cuda_experts, "choose_sizes", lambda routing: (BlockSizes(128, 108), BlockSizes(64, 44)))
    routing, x = sorted_choices(8, 16), torch.empty(8, HIDDEN, dtype=torch.uint8)
    gate_up, down = codes(2 * INNER, HIDDEN), codes(HIDDEN, INNER)
    active = cuda_experts.first(x, torch.ones(1, 8), routing, gate_up, SPEC.top_k, BF16)
    assert (active.shape, active.dtype) == ((32, INNER), BF16)
    rows = torch.empty(32, INNER, dtype=torch.uint8)
    out = cuda_experts.second(rows, torch.ones(1, 32), routing, down, torch.ones(8, 4), BF16)
    assert (out.shape, out.dtype) == ((32, HIDDEN), BF16)
    tiles = routing.tiles(16)
    (one, grid, *first), (other, wide, *second) = launches
    assert grid == (tiles * 4, 1, 1) and first[:2] == [((32 * 2 * INNER, HIDDEN), 64, 128), ((8, HIDDEN), 1, 128)]
    assert first[-3:] == [tiles, INNER, 4] and first[6] == 0
    assert wide == (tiles * 8, 1, 1) and second[:2] == [((32 * HIDDEN, INNER), 64, 128), ((32, INNER), 16, 128)]
    assert second[-3:] == [tiles, HIDDEN, 2] and second[6] != 0
    assert isinstance(one, CudaKernel) and isinstance(other, CudaKernel)
    assert (one._macros["FIRST"], other._macros["FIRST"]) == (1, 0)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("tokens", [1, 2, 9, 40, 200])
def test_against_float64(tokens: int) -> None:
    """With tiles of all heights; tokens that are alike fill several tiles of an expert. Bitwise the same again and again."""
    gate_up, down = codes(2 * INNER, HIDDEN, "cuda"), codes(HIDDEN, INNER, "cuda")
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
    weights = torch.rand(tokens, SPEC.top_k, device="cuda")
    experts = torch.rand(tokens, SPEC.num_experts, device="cuda").topk(SPEC.top_k).indices.int()
    wanted = wanted_sum(x, experts, weights, gate_up, down)
    for chosen, rows in ((experts, 8), (experts, 16), (experts, 32), (experts[:1].expand(tokens, -1).contiguous(), 16)):
        routing = triton_sort.sort_choices(chosen, SPEC.num_experts, False, tokens=rows)
        if chosen is not experts:
            wanted = wanted_sum(x, chosen, weights, gate_up, down)
        got = product(x, chosen, weights, gate_up, down, routing)
        assert (got.double() - wanted).norm() < 0.04 * wanted.norm()
        for _ in range(10):
            assert torch.equal(product(x, chosen, weights, gate_up, down, routing), got)


def product(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: ExpertCodes, down: ExpertCodes, routing: Routing
) -> torch.Tensor:
    rows, scales = moe._rounded(x, gate_up)
    rows, scales = moe._rounded(cuda_experts.first(rows, scales, routing, gate_up, SPEC.top_k, BF16), down)
    return moe._sum(cuda_experts.second(rows, scales, routing, down, weights, BF16), experts, None, SPEC)


def wanted_sum(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: ExpertCodes, down: ExpertCodes
) -> torch.Tensor:
    """The experts' products in float64, of rows that are rounded as the kernel rounds them."""

    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (gate_up.round_rows(x[token]).double() @ gate_up.dequantize(expert).double().t()).chunk(2, 1)
        active = torch.nn.functional.silu(gate) * up
        out = down.round_rows(active.to(BF16)).double() @ down.dequantize(expert).double().t()
        total.index_add_(0, token, out * weights[token, choice].double()[:, None])
    return total


def test_reference_of_the_reference() -> None:
    """``wanted_sum`` is what the reference computes, but for its roundings."""
    gate_up, down = codes(2 * INNER, HIDDEN), codes(HIDDEN, INNER)
    x, weights = torch.randn(5, HIDDEN, dtype=BF16), torch.rand(5, SPEC.top_k)
    experts = torch.rand(5, SPEC.num_experts).topk(SPEC.top_k).indices.int()
    wanted = wanted_sum(x, experts, weights, gate_up, down)
    assert (ref.moe_mlp(x, experts, weights, gate_up, down, SPEC).double() - wanted).norm() < 0.04 * wanted.norm()
