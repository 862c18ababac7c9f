"""The kernel in CUDA C++ that chooses experts and sorts their tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear.fp8_reference import quantize_rows_ref
from headrace.kernels.moe import choose_experts, cuda_router
from headrace.kernels.moe import reference as ref
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.cuda_router import takes
from headrace.model_spec import MoeSpec

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
HIDDEN, INNER = 2048, 256
SPEC = MoeSpec(num_experts=128, top_k=8, intermediate_size=INNER)
ROUTES = {
    "plain": SPEC,
    "sigmoid": dataclasses.replace(SPEC, scoring="sigmoid", correction_bias=True, router_bias=True, routed_scale=2.5),
    "unnormalized": dataclasses.replace(SPEC, normalize=False, top_k=3),
    "few": dataclasses.replace(SPEC, num_experts=32, top_k=32),
}


def coded(spec: MoeSpec, device: str, width: int = HIDDEN) -> ExpertCodes:
    shape = spec.num_experts, 2 * INNER, width
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
    scales = torch.full((spec.num_experts, 1, 2 * INNER), 2**-12, device=device)
    return ExpertCodes("e4m3", shape, codes, scales, (1, width), x_group=width)


@pytest.mark.parametrize("rows", [8, 64])
def test_kernels_compile(rows: int, nvrtc: None) -> None:
    for name, spec in ROUTES.items():
        more = name == "sigmoid"
        for hidden, tile, rounds in ((HIDDEN, 16, True), (2 * HIDDEN, 0, False)):
            kernel = cuda_router._kernel.__wrapped__(spec, hidden, rows, more, more, tile, rounds)
            assert kernel.binary().startswith(b"\x7fELF")


def test_which_routers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_router, "refusals", lambda device: ())
    x, weight = torch.empty(5, HIDDEN).bfloat16(), torch.empty(128, HIDDEN)
    assert takes(x, weight, SPEC)
    assert not takes(x[:4], weight, SPEC) and not takes(x.half(), weight, SPEC)
    assert not takes(torch.empty(cuda_router.MAX_TOKENS + 1, HIDDEN).bfloat16(), weight, SPEC)
    assert not takes(x[:, :1024], weight[:, :1024], SPEC) and not takes(x, weight[:60], SPEC)
    assert not takes(x, weight, dataclasses.replace(SPEC, num_groups=4, top_groups=2))
    monkeypatch.setattr(cuda_router, "refusals", lambda device: ("it is no Hopper",))
    assert not takes(x, weight, SPEC)


@pytest.mark.parametrize(
    ("tokens", "rows", "clusters", "sorts"), [(5, 8, 1, 1), (32, 32, 1, 1), (33, 16, 3, 0), (64, 16, 4, 0), (300, 64, 5, 0)]
)
def test_what_the_kernel_is_given(tokens: int, rows: int, clusters: int, sorts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tokens that are sorted fit in one cluster, which is given the room for all tiles that there may be."""
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    x, weight = torch.empty(tokens, HIDDEN).bfloat16(), torch.empty(128, HIDDEN)
    choice = cuda_router.choose_experts(x, weight, None, None, SPEC, coded(SPEC, "cpu"))
    assert choice.experts.shape == choice.weights.shape == (tokens, 8)
    ((kernel, grid, *given),) = launches
    assert isinstance(kernel, CudaKernel) and grid == (16 * clusters, 1, 1)
    sizes = {name: kernel._macros[name] for name in ("ROWS", "SORT", "ROUND", "TOP_K")}
    assert sizes == {"ROWS": rows, "SORT": sorts, "ROUND": 1, "TOP_K": 8}
    assert choice.prepared is not None and choice.prepared.rounding is not None
    routing = choice.prepared.routing
    assert (routing is not None) == bool(sorts)
    assert given[-6:-3] == [2 * HIDDEN, tokens, 0 if routing is None else routing.tiles(16)]
    assert routing is None or routing.table is None or len(routing.table) == routing.tiles(16)
    cuda_router.choose_experts(x, weight, None, None, SPEC, None)
    assert launches[1][0]._macros["SORT"] == launches[1][0]._macros["ROUND"] == 0  # type: ignore[attr-defined]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("tokens", [5, 8, 13, 40, 64, 65, 300])
@pytest.mark.parametrize("name", ROUTES)
def test_choices(name: str, tokens: int) -> None:
    """Logits are exact enough for the reference's choices, but of tokens whose scores are nearly equal."""
    spec = ROUTES[name]
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN + 64, device="cuda").bfloat16()[:, :HIDDEN]
    weight = torch.randn(spec.num_experts, HIDDEN, device="cuda") * 0.02
    bias = torch.randn(spec.num_experts, device="cuda") * 0.1 if spec.router_bias else None
    correction = torch.randn(spec.num_experts, device="cuda") * 0.1 if spec.correction_bias else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    wanted, factors = ref.route(exact.float(), spec, correction)
    choice = cuda_router.choose_experts(x, weight, bias, correction, spec, coded(spec, "cuda"))
    same = (choice.experts.sort(1).values == wanted.sort(1).values).all(1)
    assert (~same).sum() <= 1 + tokens // 100
    empty = torch.zeros(tokens, spec.num_experts, device="cuda")
    got = empty.scatter(1, choice.experts.long(), choice.weights)
    torch.testing.assert_close(got[same], empty.scatter(1, wanted.long(), factors)[same], atol=1e-5, rtol=1e-4)
    again = cuda_router.choose_experts(x, weight, bias, correction, spec, None)
    assert torch.equal(again.experts, choice.experts) and torch.equal(again.weights, choice.weights)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("width", [HIDDEN, 2 * HIDDEN])
@pytest.mark.parametrize("tokens", [5, 8, 21, 32])
def test_order_tiles_and_rounded_rows(tokens: int, width: int) -> None:
    """They are those of the kernels that sort and round alone; tokens that are alike go to the same experts."""
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, width, device="cuda").bfloat16(), torch.randn(128, width, device="cuda") * 0.02
    for rows in (x, x[:1].repeat(tokens, 1)):
        experts, _, prepared = cuda_router.choose_experts(rows, weight, None, None, SPEC, coded(SPEC, "cuda", width))
        assert prepared is not None and prepared.routing is not None and prepared.rounding is not None
        routing, flat = prepared.routing, experts.flatten().cpu()
        order = flat.argsort(stable=True)
        assert torch.equal(routing.order.cpu().long(), order)
        counts = flat.bincount(minlength=128).tolist()
        starts = [sum(counts[:expert]) for expert in range(129)]
        assert routing.start.tolist() == starts and routing.table is not None
        tiles = [
            [expert, at, starts[expert + 1]]
            for expert in range(128)
            for at in range(starts[expert], starts[expert + 1], routing.table_tokens)
        ]
        table = routing.table.tolist()
        assert [row[:3] for row in table[: len(tiles)]] == tiles and {row[0] for row in table[len(tiles) :]} <= {128}
        logits = rows.double() @ weight.double().t()
        assert (experts.sort(1).values == logits.topk(8).indices.sort(1).values).all(1).sum() >= tokens - 1
        codes, scales = quantize_rows_ref(rows.cpu(), width)
        assert torch.equal(prepared.rounding.codes.cpu(), codes.view(torch.uint8))
        assert torch.equal(prepared.rounding.scales.flatten().cpu(), scales.flatten())


@pytest.mark.gpu
@GPU
def test_numbers_that_are_none() -> None:
    """A token without numbers gets experts that exist, and leaves the others alone."""
    x, weight = torch.randn(8, HIDDEN, device="cuda").bfloat16(), torch.randn(128, HIDDEN, device="cuda")
    before = choose_experts(x, weight, None, None, SPEC)
    x[3, 5] = torch.nan
    experts, weights, _ = choose_experts(x, weight, None, None, SPEC)
    others = torch.arange(8, device="cuda") != 3
    assert torch.equal(experts[others], before[0][others]) and torch.equal(weights[others], before[1][others])
    assert len(set(experts[3].tolist())) == 8 and int(experts[3].min()) >= 0 and int(experts[3].max()) < 128
