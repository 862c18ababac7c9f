"""The kernels of mixtures of experts against their references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.lora import Segment
from headrace.kernels.moe import reference as ref
from headrace.kernels.moe import router_logits, triton_sort
from headrace.kernels.moe import triton as routing
from headrace.kernels.moe import triton_experts as moe
from headrace.kernels.moe import triton_router as router
from headrace.kernels.moe.tiling import MoeTiling, most_tiles
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec
from kernels.closeness import STEP

# The interpreter computes by numpy, which says so when a number overflows or is none.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")

SPEC = MoeSpec(num_experts=12, top_k=3, intermediate_size=20)
ROUTES = {
    "plain": SPEC,
    "one": dataclasses.replace(SPEC, top_k=1),
    "all": dataclasses.replace(SPEC, top_k=12),
    "sigmoid": dataclasses.replace(SPEC, scoring="sigmoid", correction_bias=True, routed_scale=2.5),
    "unnormalized": dataclasses.replace(SPEC, normalize=False, routed_scale=16.0),
    "groups-max": dataclasses.replace(SPEC, num_groups=4, top_groups=2),
    "groups-top2": dataclasses.replace(
        SPEC, num_groups=3, top_groups=2, group_score="top2", scoring="sigmoid", correction_bias=True
    ),
    "groups-of-all": dataclasses.replace(SPEC, num_groups=4, top_groups=4),
    "many": MoeSpec(
        num_experts=160, top_k=6, intermediate_size=8, num_groups=8, top_groups=3, normalize=False, routed_scale=16.0
    ),
}


def by_expert(experts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of each token in the order of their experts."""
    order = experts.cpu().argsort(-1)
    return experts.cpu().gather(1, order), weights.cpu().gather(1, order)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ROUTES)
def test_routes(name: str, tokens: int, device: torch.device) -> None:
    spec = ROUTES[name]
    torch.manual_seed(tokens)
    logits = 2 * torch.randn(tokens, spec.num_experts)
    bias = 0.3 * torch.randn(spec.num_experts) if spec.correction_bias else None
    got = by_expert(*routing.route(logits.to(device), spec, None if bias is None else bias.to(device)))
    expected = by_expert(*ref.route(logits, spec, bias))
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=1e-5)


def test_experts_of_a_rank_are_numbered_from_zero(device: torch.device) -> None:
    experts = torch.randint(0, 12, (7, 200), dtype=torch.int32)
    for held in ((0, 5), (5, 12)):
        expected = ref.held_experts(experts, *held)
        assert torch.equal(routing.held_experts(experts.to(device), *held).cpu(), expected)
    assert routing.held_experts(experts[:0].to(device), 0, 5).shape == (0, 200)


def test_routes_of_wide_rows(device: torch.device) -> None:
    logits = torch.randn(5, 40)
    got = by_expert(*routing.route(logits.to(device)[:, 4:16], SPEC))
    assert torch.equal(got[0], by_expert(*ref.route(logits[:, 4:16], SPEC))[0])


def test_ties_and_numbers_that_are_none(device: torch.device) -> None:
    """Experts are always different ones that there are; a token that is not finite has weights that are not."""
    logits = torch.zeros(3, 12)
    logits[1] = torch.nan
    experts, weights = (t.cpu() for t in routing.route(logits.to(device), SPEC))
    assert experts[0].tolist() == experts[2].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))
    assert ((experts >= 0) & (experts < 12)).all()
    assert not weights[1].isfinite().any()


def test_scores_that_vanish(device: torch.device) -> None:
    """Softmax leaves nothing for most experts: they are taken all the same, with weight 0."""
    logits = torch.full((1, 12), -400.0)
    logits[0, 7] = 0.0
    experts, weights = (t.cpu() for t in routing.route(logits.to(device), SPEC))
    assert experts[0, 0] == 7
    assert len(set(experts[0].tolist())) == 3
    assert weights[0].tolist() == [1.0, 0.0, 0.0]


def operands(spec: MoeSpec, tokens: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    torch.manual_seed(tokens)
    count, inner = spec.num_experts, spec.intermediate_size
    experts = torch.rand(tokens, count).topk(spec.top_k).indices.int()
    weights = torch.rand(tokens, spec.top_k)
    x, gate_up = torch.randn(tokens, hidden), torch.randn(count, spec.first_outputs, hidden) * hidden**-0.5
    down = torch.randn(count, hidden, inner) * inner**-0.5
    biases: list[torch.Tensor | None] = [None, None]
    if spec.bias:
        biases = [torch.randn(count, spec.first_outputs).to(dtype), torch.randn(count, hidden).to(dtype)]
    return [x.to(dtype), experts, weights, gate_up.to(dtype), down.to(dtype), spec, *biases]


def check(given: list, device: torch.device, steps: float = 4, **options: MoeTiling | bool) -> None:
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
    got = moe.moe_mlp(*moved, **options).cpu()
    expected = ref.moe_mlp(*given)
    assert got.dtype == expected.dtype
    bound = steps * STEP[got.dtype]
    torch.testing.assert_close(got, expected, atol=bound * max(expected.abs().max().item(), 1e-3), rtol=bound)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(0, 8, 16), (1, 7, 40), (3, 9, 1100), (6, 13, 300), (64, 3, 24)])
def test_logits(tokens: int, experts: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(tokens, hidden + 3).to(dtype), torch.randn(experts, hidden), torch.randn(experts)
    x = x[:, :hidden]
    for own in (None, bias):
        got = router.router_logits(x.to(device), weight.to(device), None if own is None else own.to(device))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.cpu(), torch.nn.functional.linear(x.float(), weight, own), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "tiling"),
    [(70, 12, 72, None), (65, 128, 512, None), (33, 70, 200, router.RouterTiling(64, 16, 64, 4, 3, splits=3))],
)
def test_logits_of_matrix_units(
    rows: int, experts: int, hidden: int, tiling: router.RouterTiling | None, device: torch.device
) -> None:
    """Weights lose nothing, rows of a wider tensor and channels that several programs share included."""
    x, weight, bias = torch.randn(rows, hidden + 8).bfloat16()[:, :hidden], torch.randn(experts, hidden), torch.randn(experts)
    for own in (None, bias):
        added = None if own is None else own.to(device)
        got = router.router_tiles(x.to(device), weight.to(device), added, tiling).cpu()
        expected = x.double() @ weight.double().T + (0 if own is None else own)
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-5)


def test_logits_of_many_rows_are_a_librarys(device: torch.device) -> None:
    weight = torch.randn(5, 8, device=device)
    x = torch.randn(65, 8, device=device)
    torch.testing.assert_close(router_logits(x, weight).cpu(), x.cpu() @ weight.cpu().T)


@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize("plus", [False, True], ids=["alone", "plus"])
def test_few_choices_have_a_tile_each(tokens: int, plus: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of one expert, too; and what is added comes after the sum is rounded."""
    spec = MoeSpec(num_experts=64, top_k=4, intermediate_size=20, bias=True)
    given = operands(spec, tokens, 40, torch.float16)
    given[1][-1] = given[1][0]
    added = {"plus": torch.randn(tokens, 40).half()} if plus else {}
    expected = ref.moe_mlp(*given, **added)
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
    moved_plus = {name: value.to(device) for name, value in added.items()}
    got = moe.moe_mlp(*moved, **moved_plus)
    monkeypatch.setattr(triton_sort, "_FEW", 0)
    assert torch.equal(got, moe.moe_mlp(*moved, **moved_plus))
    bound = 4 * STEP[torch.float16]
    torch.testing.assert_close(got.cpu(), expected, atol=bound * expected.abs().max().item(), rtol=bound)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_of_other_ranks_add_nothing(tokens: int, device: torch.device) -> None:
    """The parts of the ranks that hold some experts each add up to what one with all of them computes."""
    spec = MoeSpec(num_experts=9, top_k=4, intermediate_size=20, bias=True)
    x, experts, weights, gate_up, down, _, *biases = operands(spec, tokens, 40, torch.float32)
    expected, total = ref.moe_mlp(x, experts, weights, gate_up, down, spec, *biases), torch.zeros(tokens, 40)
    for held in ((0, 2), (2, 3), (3, 9)):
        own = ref.held_experts(experts, *held)
        parts = [part[slice(*held)].contiguous() for part in (gate_up, down)]
        part = [x, own, weights, *parts, dataclasses.replace(spec, held=held), *(b[slice(*held)].contiguous() for b in biases)]
        check(part, device)
        total += ref.moe_mlp(*part)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", CLAMPED_SWIGLU])
def test_products(activation: str, tokens: int, device: torch.device) -> None:
    spec = dataclasses.replace(SPEC, act=activation, bias=activation == CLAMPED_SWIGLU, limit=1.2)
    check(operands(spec, tokens, 40, torch.float32), device)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products_without_gates(bias: bool, tokens: int, device: torch.device) -> None:
    check(operands(dataclasses.replace(SPEC, act="relu2", gated=False, bias=bias), tokens, 40, torch.float32), device)


def test_products_in_float16(device: torch.device) -> None:
    check(operands(dataclasses.replace(SPEC, bias=True), 9, 40, torch.float16), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 17, 33, 80, 200])
@pytest.mark.parametrize("sizes", [(4, 4, 64, 48), (12, 3, 128, 96)], ids=str)
def test_matrix_units(sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype) -> None:
    """Tiles of every size, which have instructions of their own."""
    experts, top_k, hidden, inner = sizes
    given = operands(MoeSpec(num_experts=experts, top_k=top_k, intermediate_size=inner), tokens, hidden, dtype)
    check(given, torch.device("cuda"))
    check(given, torch.device("cuda"), batch_invariant=True)


@pytest.mark.parametrize("sizes", [(1, 1, 5, 3), (3, 3, 70, 130), (40, 2, 33, 8)], ids=str)
def test_odd_sizes(sizes: tuple[int, int, int, int], device: torch.device) -> None:
    experts, top_k, hidden, inner = sizes
    check(operands(MoeSpec(num_experts=experts, top_k=top_k, intermediate_size=inner), 11, hidden, torch.float32), device)


@pytest.mark.parametrize("tiling", [MoeTiling(16, 16, 16, 4, 1), MoeTiling(32, 64, 32, 4, 2)], ids=str)
def test_tilings(tiling: MoeTiling, device: torch.device) -> None:
    check(operands(SPEC, 50, 40, torch.float32), device, tiling=tiling)


@pytest.mark.parametrize("swap", [False, True], ids=["straight", "swapped"])
def test_weights_that_are_fetched(swap: bool, device: torch.device) -> None:
    """Tiles reach past an expert's rows and outputs, and past the last channel."""
    spec = MoeSpec(num_experts=5, top_k=3, intermediate_size=72)
    given = operands(spec, 21, 40, torch.float16)
    check(given, device, tiling=MoeTiling(16, 64, 64, 4, 2, swap=swap, fetch=True))


def test_all_tokens_to_one_expert(device: torch.device) -> None:
    """More than a tile of an expert, and experts without tokens before and after it."""
    spec = dataclasses.replace(SPEC, top_k=1)
    given = operands(spec, 70, 40, torch.float32)
    given[1] = torch.full((70, 1), 5, dtype=torch.int32)
    check(given, device)


def test_more_choices_than_are_counted_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sort, "_CHUNK", 16)
    check(operands(SPEC, 37, 24, torch.float32), device)


@pytest.mark.parametrize("segment", [16, 64])
def test_order_of_segments(segment: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of other ranks, which are numbered behind the last, have no place in the order."""
    for name, size in (("_LONG", 64), ("_SEGMENTS", ((1000, segment),)), ("_PART", 16)):
        monkeypatch.setattr(triton_sort, name, size)
    experts = torch.randint(0, 13, (50, 3), dtype=torch.int32)
    routing = triton_sort.sort_choices(experts.to(device), 12, True, tokens=8)
    flat = experts.flatten()
    held = int((flat < 12).sum())
    assert torch.equal(routing.order[:held].cpu(), flat.argsort(stable=True)[:held].int())
    start = [int((flat < expert).sum()) for expert in range(13)]
    assert routing.start.tolist() == start
    ends = list(zip(range(12), start, start[1:], strict=False))
    tiles = [[expert, first, end] for expert, begin, end in ends for first in range(begin, end, 8)]
    table = routing.begins(8)[:, :3].tolist()
    assert table[: len(tiles)] == tiles and all(expert == 12 for expert, *_ in table[len(tiles) :])
    assert len(table) >= routing.tiles(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_of_segments(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sort, "_LONG", 64)
    monkeypatch.setattr(triton_sort, "_SEGMENTS", ((1000, 32),))
    check(operands(SPEC, 37, 24, dtype), device)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    given = operands(SPEC, 6, 40, torch.float32)
    wide = torch.full((6, 60), torch.nan)
    wide[:, 8:48] = given[0]
    got = moe.moe_mlp(wide.to(device)[:, 8:48], *(v.to(device) if isinstance(v, torch.Tensor) else v for v in given[1:]))
    torch.testing.assert_close(got.cpu(), ref.moe_mlp(*given), atol=1e-5, rtol=1e-5)


def test_no_tokens(device: torch.device) -> None:
    given = operands(SPEC, 0, 40, torch.float32)
    assert moe.moe_mlp(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in given)).shape == (0, 40)


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("choices", [1, 5, 64, 1000])
def test_most_tiles(choices: int, tokens: int) -> None:
    """No routing makes more tiles than are launched, and some makes as many."""
    count, found = 8, 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        shares = torch.rand(count, generator=generator) ** (seed % 7)
        counts = torch.bincount(torch.multinomial(shares, choices, replacement=True, generator=generator), minlength=count)
        found = max(found, int(((counts + tokens - 1) // tokens).sum()))
    worst = [1] * (min(count, choices) - 1)
    worst.append(choices - len(worst))
    assert found <= most_tiles(choices, count, tokens) == sum(-(-own // tokens) for own in worst)


@pytest.mark.parametrize("tokens", [1, 6, 40])
@pytest.mark.parametrize(
    "spec", [SPEC, dataclasses.replace(SPEC, act="relu2", gated=False, held=(4, 12)), dataclasses.replace(SPEC, bias=True)]
)
def test_adapters_of_experts(spec: MoeSpec, tokens: int, device: torch.device) -> None:
    x, experts, weights, gate_up, down, _, *biases = operands(spec, tokens, 40, torch.float32)
    assert isinstance(x, torch.Tensor) and isinstance(experts, torch.Tensor)
    if spec.held is not None:
        experts, gate_up, down = ref.held_experts(experts, *spec.held), gate_up[4:], down[4:]
    parts, count, rank = spec.first_outputs // spec.intermediate_size, spec.num_held, 5
    first = 0.3 * torch.randn(3, count * parts * rank, 40), 0.3 * torch.randn(3, count * spec.first_outputs, rank)
    second = 0.3 * torch.randn(3, count * rank, spec.intermediate_size), 0.3 * torch.randn(3, count * 40, rank)
    places = torch.tensor([(2, -1, 0)[token % 3] for token in range(tokens)], dtype=torch.int32)
    segments = [Segment(token, token + 1, place) for token, place in enumerate(places.tolist()) if place >= 0]
    given = [x, experts, weights, gate_up, down, spec, *biases]
    expected = ref.moe_mlp(*given, adapters=ref.ExpertFactors(first, second, segments, None))
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
    there = [(a.to(device), b.to(device)) for a, b in (first, second)]
    got = moe.moe_mlp(*moved, adapters=ref.ExpertFactors(*there, segments, places.to(device))).cpu()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    base = moe.moe_mlp(*moved).cpu()
    # Triton sums a product of one step onto the bias, if nothing else is added between the two.
    close = 1e-6 if spec.bias else 0.0
    torch.testing.assert_close(got[places < 0], base[places < 0], atol=close, rtol=close)
    assert not torch.isclose(got[places >= 0], base[places >= 0]).all(1).any()
