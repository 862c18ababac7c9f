"""The cutoffs of filters against sorting, and samples among the kept tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headrace.kernels.sampling.triton_sample import SampleOutput, sample
from headrace.sampling.random import uniform
from headrace.sampling.vocabulary import pick_wide

from . import filter_reference as ref

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero", "ignore:overflow", "ignore:All-NaN slice"
)

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

NONE = 10**9
"""A top_k of no limit: put down to the vocabulary."""
FILTERS = [
    (1.0, NONE, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 1, 0.5, 0.3),
    (1.0, 50, 1.0, 0.0),
    (1.3, 700, 1.0, 0.0),
    (1.3, 700, 0.9, 0.01),
    (1.0, NONE, 0.9, 0.0),
    (3.0, NONE, 0.999999, 0.0),
    (1.0, NONE, 1e-9, 0.0),
    (0.05, NONE, 0.5, 0.0),
    (1.0, NONE, 1.0, 0.05),
    (2.0, NONE, 0.8, 0.02),
    (1.0, NONE, 1.0, 1.0),
    (1e-30, 30, 0.9, 0.1),
    (0.9, 3, 1e-9, 0.0),
]


def asked(vocab: int, rows: Sequence[tuple[float, float, float, float]] = FILTERS) -> torch.Tensor:
    """``[N, 4]``"""
    filters = torch.tensor(rows, dtype=torch.float64)
    filters[:, 1].clamp_(max=vocab)
    return filters


def numbers_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 1 << 32, (count, 3), generator=generator), torch.arange(count) * 7


def sampled_by(
    logits: torch.Tensor, filters: torch.Tensor, device: torch.device, temperatures: torch.Tensor | None = None
) -> SampleOutput:
    keys, positions = numbers_of(len(logits))
    temperatures = (filters[:, 0] if temperatures is None else temperatures).float()
    got = sample(
        logits.to(device),
        temperatures.to(device),
        keys.to(device),
        positions.to(device),
        filters=filters.contiguous().to(device),
    )
    assert got.cutoffs is not None
    return SampleOutput(got.tokens.cpu(), got.best.cpu(), got.log_sums.cpu(), got.cutoffs.cpu())


def check(logits: torch.Tensor, filters: torch.Tensor, device: torch.device) -> None:
    """Cutoffs equal the reference's, and tokens those that the sampler selects among the kept ones."""
    got = sampled_by(logits, filters, device)
    temperatures = filters[:, 0].float()
    expected = ref.cutoffs(logits, temperatures, filters)
    assert got.cutoffs is not None
    assert torch.equal(got.cutoffs, expected), (got.cutoffs - expected, filters[got.cutoffs != expected])
    weights = ((logits.float() - got.best.unsqueeze(1)) / temperatures.unsqueeze(1)).exp()
    weights.masked_fill_(logits < expected.unsqueeze(1), 0.0)
    assert torch.equal(got.tokens, pick_wide(weights, uniform(*numbers_of(len(logits)))))


def some(case: int, device: torch.device) -> list[int]:
    """Returns the filters that a case tries: all, or every n-th where a row takes the interpreter its time."""
    every = list(range(len(FILTERS)))
    return every if device.type == "cuda" else every[case % 6 :: 6]


@pytest.mark.parametrize("case", range(12))
def test_floors_and_draws(case: int, device: torch.device) -> None:
    """Few levels: many equal logits, of which some are below zero and some above."""
    vocab, levels = [4097, 7, 9001, 128][case % 4], [None, 4, 300][case // 4]
    torch.manual_seed(case)
    logits = 3 * torch.randn(len(FILTERS), vocab)
    if levels is not None:
        logits = (torch.randint(0, levels, logits.shape) - levels // 2).float() * (12 / levels)
        logits[:, ::5] *= -1.0
    logits[::2, vocab // 3 :: 3] = -torch.inf
    check(logits[some(case, device)], asked(vocab)[some(case, device)], device)


@pytest.mark.parametrize("case", range(6))
def test_logits_of_any_size(case: int, device: torch.device) -> None:
    """Spread so much about a middle."""
    torch.manual_seed(case)
    spread, middle = [1e-30, 1e-3, 0.5, 20.0, 1e30, 2.0][case], [0.0, 1000.0, -40.0, 0.0, 0.0, -1000.0][case]
    logits = middle + spread * torch.randn(len(FILTERS), 5000)
    check(logits[some(case + 1, device)], asked(5000)[some(case + 1, device)], device)


def test_sixteen_bits(device: torch.device) -> None:
    torch.manual_seed(6)
    check((4 * torch.randn(len(FILTERS), 6000)).bfloat16()[some(1, device)], asked(6000)[some(1, device)], device)


@pytest.mark.parametrize("vocab", [49152, pytest.param(151_937, marks=pytest.mark.slow)])
def test_vocabularies_of_models(vocab: int, device: torch.device) -> None:
    """The second one's last block has a single token."""
    torch.manual_seed(7)
    filters = asked(vocab, [(0.6, 20, 0.95, 0.0), (1.0, NONE, 0.9, 0.0), (1.0, 40_000, 0.999, 0.0)])
    logits = 2.5 * torch.randn(3, vocab)
    logits[0, -1] = 20.0
    check(logits, filters, device)


def test_equal_logits_share_their_fate(device: torch.device) -> None:
    logits = torch.full((3, 5000), -25.0)
    logits[:, [10, 20]] = torch.tensor([3.0, 2.0])
    logits[:, [5, 50, 150, 4999]] = 1.0
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    got = sampled_by(logits, asked(5000, [(1.0, 3, 1.0, 0.0), (1.0, 100, 0.8, 0.0), (1.0, 3, 0.5, 0.9)]), device)
    assert got.cutoffs is not None and got.cutoffs.tolist() == [1.0, 1.0, 0.0]


def test_broken_rows_stay_alone(device: torch.device) -> None:
    torch.manual_seed(8)
    logits = torch.randn(5, 5000)
    expected = sampled_by(logits, asked(5000, FILTERS[4:9]), device)
    logits[0, 4500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    got = sampled_by(logits, asked(5000, FILTERS[4:9]), device)
    assert got.best[0].isnan() and got.best[1] == -torch.inf and got.best[2] == torch.inf
    assert ((got.tokens >= 0) & (got.tokens < 5000)).all()
    assert torch.equal(got.tokens[3:], expected.tokens[3:])
    assert got.cutoffs is not None and expected.cutoffs is not None
    assert torch.equal(got.cutoffs[3:], expected.cutoffs[3:])


def test_rows_of_slots_and_padding_rows(device: torch.device) -> None:
    """A row's sample depends on its slot alone: not on the batch, nor on its place."""
    torch.manual_seed(9)
    vocab = 5000
    filters = asked(vocab, [FILTERS[1], FILTERS[7], FILTERS[0], FILTERS[2], FILTERS[4]])
    logits = 2 * torch.randn(len(filters), vocab)
    temperatures = filters[:, 0].float()
    temperatures[3:] = 0.0
    filters[4, 0] = 0.0
    keys, positions = numbers_of(len(filters))
    alone = sampled_by(logits, filters, device, temperatures)
    assert alone.cutoffs is not None
    assert alone.cutoffs[3] == logits[3].max() and alone.cutoffs[4] == -torch.inf
    assert alone.tokens[4] == logits[4].argmax()
    order = torch.tensor([4, -1, 1, 3, 0, 2])
    held = order.clamp(min=0)
    got = sample(
        logits[held].to(device),
        temperatures.to(device),
        keys.to(device),
        positions[held].to(device),
        order.int().to(device),
        filters.to(device),
    )
    assert got.cutoffs is not None
    somebody = order >= 0
    assert torch.equal(got.tokens.cpu()[somebody], alone.tokens[order[somebody]])
    assert torch.equal(got.cutoffs.cpu()[somebody], alone.cutoffs[order[somebody]])


@pytest.mark.gpu
@no_cuda
def test_draws_follow_the_distribution() -> None:
    """The kept tokens alone, each as often as its share: one slot samples at many positions."""
    torch.manual_seed(10)
    device, count, part = torch.device("cuda"), 20_000, 2000
    logits = 1.5 * torch.randn(1, 300)
    filters = asked(300, [(0.9, 5, 0.9, 0.0)])
    keys, _ = numbers_of(1)
    found = torch.zeros(300, dtype=torch.float64)
    slots = torch.zeros(part, dtype=torch.int32, device=device)
    temperatures, keys, given = filters[:, 0].float().to(device), keys.to(device), logits.expand(part, -1).to(device)
    for start in range(0, count, part):
        positions = torch.arange(start, start + part, device=device)
        got = sample(given.contiguous(), temperatures, keys, positions, slots, filters.to(device))
        found += torch.bincount(got.tokens.cpu(), minlength=300)
    cutoff = ref.cutoffs(logits, filters[:, 0].float(), filters)
    shares = (logits[0].double() / 0.9).softmax(-1).masked_fill(logits[0] < cutoff, 0.0)
    expected = shares / shares.sum() * count
    kept = expected > 0
    assert not found[~kept].any() and 2 < kept.sum() <= 5
    statistic, freedom = float(((found - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1
    # Mean and variance of the statistic are freedom and twice that; 4 deviations.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.gpu
@pytest.mark.captures
@no_cuda
@pytest.mark.parametrize("rows", [1, 256])
def test_a_captured_draw_of_any_slots(rows: int) -> None:
    """Captured once, while every row was padding, which no kernel that waits could be; replayed for any logits and slots."""
    device, vocab = torch.device("cuda"), 151_936
    torch.manual_seed(11)
    filters = asked(vocab).to(device)
    keys, positions = (tensor.to(device) for tensor in numbers_of(len(FILTERS)))
    temperatures = filters[:, 0].float()
    logits = torch.zeros(rows, vocab, device=device)
    slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
    places = torch.zeros(rows, dtype=torch.int64, device=device)
    sample(logits, temperatures, keys, places, slots, filters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, temperatures, keys, places, slots, filters)
    assert got.cutoffs is not None
    for spread in (1.0, 4.0):
        logits.copy_(spread * torch.randn(rows, vocab, device=device))
        slots.copy_(torch.arange(1, rows + 1, device=device) % len(FILTERS))
        places.copy_(positions[slots.long()])
        graph.replay()
        own = slots.long()
        expected = ref.cutoffs(logits, temperatures[own], filters[own])
        # Exponentials of other kernels end differently: a border of masses may fall beside a token.
        assert (got.cutoffs != expected).sum() <= rows // 50
        first = got.tokens.clone(), got.cutoffs.clone()
        graph.replay()
        assert torch.equal(got.tokens, first[0]) and torch.equal(got.cutoffs, first[1])
        alone = sample(logits[:1], temperatures, keys, places[:1], slots[:1], filters)
        assert torch.equal(alone.tokens, got.tokens[:1])
        weights = ((logits - got.best.unsqueeze(1)) / temperatures[own].unsqueeze(1)).exp()
        weights.masked_fill_(logits < got.cutoffs.unsqueeze(1), 0.0)
        expected_tokens = pick_wide(weights, uniform(keys[own], places))
        assert (got.tokens != expected_tokens).sum() <= rows // 50
