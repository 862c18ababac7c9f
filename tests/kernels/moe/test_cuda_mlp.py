"""Both products of experts in one launch, by the kernel in CUDA C++."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.moe import cuda_mlp, moe_mlp
from headrace.kernels.moe.cuda_mlp import choose_sizes, products, taken
from headrace.model_spec import MoeSpec

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, HIDDEN, INNER = torch.bfloat16, 512, 192
SPEC = MoeSpec(num_experts=64, top_k=4, intermediate_size=INNER)
STATIC = 16 << 10
"""Bytes of static shared memory of a block at most: more than any of these kernels has."""


def matrices(device: str, dtype: torch.dtype, spec: MoeSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(spec.num_experts)
    shapes = (2 * spec.intermediate_size, HIDDEN), (HIDDEN, spec.intermediate_size)
    first, second = (torch.randn(spec.num_experts, *shape, device=device, dtype=dtype) * shape[1] ** -0.5 for shape in shapes)
    return first, second


@pytest.mark.parametrize("experts", [32, 128, 256])
def test_kernels_compile(experts: int, nvrtc: None) -> None:
    for sizes, dtype in zip(cuda_mlp._SIZES, (BF16, torch.float16), strict=True):
        kernel = cuda_mlp._kernel.__wrapped__(sizes, dtype, 8, experts, 2048, 768, 132)
        assert kernel.binary().startswith(b"\x7fELF")


@pytest.mark.parametrize("experts", [32, 128, 256])
def test_slots_have_room(experts: int) -> None:
    """Shared memory of a multiprocessor of Hopper: 228 KB, of which a block takes 1 KB more than it asks for, the sort's
    included."""
    for sizes in cuda_mlp._SIZES:
        assert sizes.stages(experts) >= 3 and sizes.shared(experts) < sizes.kilobytes << 10
        assert sizes.resident * (sizes.kilobytes + 1) <= 228


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 33 tokens and more in 16 bits, as far as the sort reaches."""
    monkeypatch.setattr(cuda_mlp, "refusals", lambda device: ())
    (first, second), x = matrices("cpu", BF16), torch.empty(129, HIDDEN, dtype=BF16)
    experts, factors = torch.zeros(129, 4, dtype=torch.int32), torch.ones(129, 4)

    def takes(tokens: int = 33, spec: MoeSpec = SPEC, kind: torch.dtype = BF16, end: int = HIDDEN, count: int = 64) -> bool:
        one, other = first[:count].to(kind), second[:count].to(kind)
        return taken(x[:tokens, :end].to(kind), experts[:tokens], factors[:tokens], one, other, spec) is not None

    assert takes() and takes(128, kind=torch.float16) and not takes(32)
    assert takes(128) and choose_sizes(129 * 8, 64) is None
    assert not takes(kind=torch.float32) and not takes(end=HIDDEN - 64) and not takes(count=48)
    assert not takes(spec=dataclasses.replace(SPEC, act="gelu"))
    assert taken(x[:33], experts[:33].long(), factors[:33], first, second, SPEC) is None
    assert [choose_sizes(choices, 128) for choices in (1024, 1025, 2049)] == [*cuda_mlp._SIZES, None]
    monkeypatch.setattr(cuda_mlp, "refusals", lambda device: ("it is no Hopper",))
    assert not takes()


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_mlp, "tensor_map", lambda x, height, width, **promotion: (tuple(x.shape), height, width))
    (first, second), x = matrices("cpu", BF16), torch.empty(9, HIDDEN, dtype=BF16)
    experts, factors = torch.zeros(9, 4, dtype=torch.int32), torch.ones(9, 4)
    y = products(x, experts, factors, first, second)
    assert (y.shape, y.dtype) == ((36, HIDDEN), BF16)
    ((kernel, grid, *given),) = launches
    assert given[:2] == [((64 * 2 * INNER, HIDDEN), 64, 64), ((64 * HIDDEN, INNER), 64, 64)]
    assert given[2] == ((36, INNER), 8, 64) and given[-2:] == [2 * HIDDEN, 36]
    assert isinstance(kernel, CudaKernel) and kernel._macros["BLOCKS"] == grid[0]  # type: ignore[index]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("tokens", [1, 2, 8, 60, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_against_float64(tokens: int, dtype: torch.dtype) -> None:
    """With tokens that choose freely, with tokens that all choose the same experts, and with choices of none. Bitwise the same
    again and again: what a launch leaves behind is what it found."""
    first, second = matrices("cuda", dtype)
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN + 64, device="cuda", dtype=dtype)[:, :HIDDEN]
    factors = torch.rand(tokens, SPEC.top_k, device="cuda")
    free = torch.rand(tokens, SPEC.num_experts, device="cuda").topk(SPEC.top_k).indices.int()
    some = torch.where(free % 3 == 0, SPEC.num_experts, free)
    for experts in (free, free[:1].repeat(tokens, 1), SPEC.num_experts - 1 - free // 4, some):
        y = products(x, experts, factors, first, second)
        wanted = torch.zeros(tokens * SPEC.top_k, HIDDEN, dtype=torch.float64, device="cuda")
        for expert in range(SPEC.num_experts):
            choice = (experts.flatten() == expert).nonzero().flatten()
            gate, up = (x[choice // SPEC.top_k].double() @ first[expert].double().t()).chunk(2, 1)
            active = (torch.nn.functional.silu(gate) * up).to(dtype).double()
            wanted[choice] = active @ second[expert].double().t() * factors.flatten()[choice, None].double()
        held = experts.flatten() < SPEC.num_experts
        assert (y.double() - wanted)[held].norm() <= 8e-3 * wanted.norm()
        for _ in range(20):
            assert torch.equal(products(x, experts, factors, first, second)[held], y[held])


@pytest.mark.gpu
@GPU
def test_sum_of_a_tokens_experts() -> None:
    """The sum of a token's experts is that of the Triton kernels."""
    first, second = matrices("cuda", BF16)
    x = torch.randn(40, HIDDEN, device="cuda", dtype=BF16)
    experts = torch.rand(40, SPEC.num_experts, device="cuda").topk(SPEC.top_k).indices.int()
    factors = torch.rand(40, SPEC.top_k, device="cuda")
    assert taken(x, experts, factors, first, second, SPEC) is not None
    got = moe_mlp(x, experts, factors, first, second, SPEC)
    wanted = moe_mlp(x, experts, factors, first, second, SPEC, batch_invariant=True)
    assert (got.double() - wanted.double()).norm() < 1e-2 * wanted.double().norm()
