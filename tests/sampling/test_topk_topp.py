"""The draw: what the filters keep, exactly; and that draws follow the distribution they should."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.transfer import upload
from headrace.outputs import TokenLogprobs
from headrace.sampling.feature import LogitsRows
from headrace.sampling.logprobs import ALL
from headrace.sampling.topk_topp import cutoff_of, keep
from headrace.sampling.vocabulary import block_maxima, candidates
from headrace.sampling_params import LogprobsMode, SamplingParams

from .reference import Bench, probabilities, sequence


def random_logits(size: int, levels: int | None, seed: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(size, generator=generator) * scale
    return torch.randint(0, levels, (size,), generator=generator).float() / 3


filters = st.tuples(
    st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 7, 50, 300, 1500]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def final_distribution(logits: torch.Tensor, params: SamplingParams) -> tuple[dict[int, float], int]:
    """Returns the sampler's distribution, token -> probability, and the token that it sampled."""
    entry = sampled_entry(logits, params)
    found = dict(zip(entry.token_ids[1:], torch.tensor(entry.logprobs[1:]).double().exp().tolist(), strict=True))
    assert entry.token_ids[0] in found
    return found, entry.token_ids[0]


def sampled_entry(logits: torch.Tensor, params: SamplingParams) -> TokenLogprobs:
    bench = Bench(len(logits))
    bench.add(sequence(params))
    sampled = bench.step(logits.unsqueeze(0), [0])
    assert not sampled.errors()
    entry = sampled.lists()[0]
    assert entry.token_ids[0] == sampled.tokens.item()
    return entry


problems = given(filters, st.sampled_from([20, 129, 2000]), st.sampled_from([None, 4, 40]), st.integers(0, 5))


@settings(derandomize=True, max_examples=50, deadline=None)
@problems
def test_filters_keep_what_the_definition_says(
    filters: tuple[float, int, float, float], size: int, levels: int | None, seed: int
) -> None:
    keeps_what_the_definition_says(filters, size, levels, seed)


@pytest.mark.slow
@settings(derandomize=True, max_examples=400, deadline=None)
@problems
def test_many_filters_keep_what_the_definition_says(
    filters: tuple[float, int, float, float], size: int, levels: int | None, seed: int
) -> None:
    keeps_what_the_definition_says(filters, size, levels, seed)


def keeps_what_the_definition_says(filters: tuple[float, int, float, float], size: int, levels: int | None, seed: int) -> None:
    """Few levels: many equal logits. 2000 tokens: more than the first candidates."""
    temperature, top_k, top_p, min_p = filters
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=ALL, logprobs_mode="processed"
    )
    logits = random_logits(size, levels, seed)
    expected = probabilities(logits.double(), params)
    found, _ = final_distribution(logits, params)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    if top_k == 1:
        assert found == {int(logits.argmax()): 1.0}, "of equals, the first is always taken"
        return
    # Shares too small for a float32 logarithm may or may not show.
    assert {t for t, share in found.items() if share > 1e-30} == set((expected > 1e-30).nonzero().flatten().tolist())
    for token, share in found.items():
        assert share == pytest.approx(float(expected[token]), rel=1e-4, abs=1e-12)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(filters, st.sampled_from([20, 129, 200]), st.sampled_from([None, 4]), st.sampled_from(["raw", "processed"]))
def test_the_mask_is_the_set_that_was_sampled_from(
    filters: tuple[float, int, float, float], size: int, levels: int | None, mode: LogprobsMode
) -> None:
    temperature, top_k, top_p, min_p = filters
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = SamplingParams(**fields, logprobs=ALL, logprobs_mode=mode, return_sampling_mask=True)
    logits = random_logits(size, levels, 0)
    entry = sampled_entry(logits, params)
    kept = probabilities(logits.double(), params).nonzero().flatten().tolist()
    kept = [int(logits.argmax())] if top_k == 1 else kept
    assert (entry.sampling_mask or list(range(size))) == kept
    assert (entry.sampled_from == b"") == (len(kept) == size)
    if mode == "processed" or len(kept) == size:
        assert {token for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True) if logprob > -60} <= {*kept}


def test_greedy_rows_have_one_token() -> None:
    """Of several rows each has its own mask, and a row without one is not affected."""
    bench = Bench(40)
    fields = [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 3}, {"temperature": 0.0}]
    for slot, own in enumerate(fields):
        params = SamplingParams(**own, logprobs=2, logprobs_mode="processed", return_sampling_mask=slot < 2)
        bench.add(sequence(params, slot=slot))
    logits = torch.stack([random_logits(40, None, seed) for seed in range(3)])
    entries = bench.step(logits, [0, 1, 2]).lists()
    best = logits.argmax(-1).tolist()
    assert (entries[0].token_ids, entries[0].logprobs, entries[0].sampling_mask) == ([best[0]] * 2, [0.0, 0.0], [best[0]])
    assert entries[1].sampling_mask == sorted(logits[1].topk(3).indices.tolist())
    assert (entries[2].logprobs, entries[2].sampled_from) == ([0.0, 0.0], None)


def test_equal_logits_share_their_fate() -> None:
    """The third best has three equals: top_k 3 keeps them all, and so does a top_p that ends among them."""
    logits = torch.full((200,), -5.0)
    logits[[10, 20]] = torch.tensor([3.0, 2.0])
    logits[[5, 50, 150, 199]] = 1.0
    for params in (
        SamplingParams(top_k=3, logprobs=ALL, logprobs_mode="processed"),
        SamplingParams(top_k=100, top_p=0.8, logprobs=ALL, logprobs_mode="processed"),
    ):
        assert set(final_distribution(logits, params)[0]) == {10, 20, 5, 50, 150, 199}


def test_equals_beyond_the_first_candidates_count() -> None:
    """5000 tokens as good as the fiftieth."""
    logits = torch.zeros(6000)
    logits[1000:] = 1.0
    logits[:49] = 2.0 + torch.arange(49) / 100
    params = SamplingParams(top_k=50, logprobs=ALL, logprobs_mode="processed")
    assert len(final_distribution(logits, params)[0]) == 5049


@settings(derandomize=True, max_examples=80, deadline=None)
@given(filters, st.sampled_from([None, 4, 40]), st.integers(0, 5))
def test_both_ways_to_the_floor_agree(filters: tuple[float, int, float, float], levels: int | None, seed: int) -> None:
    temperature, top_k, top_p, min_p = filters
    logits = random_logits(900, levels, seed)
    params = [temperature, float(min(top_k or 900, 900)), top_p, min_p]
    weights = ((logits - logits.max()) / temperature).exp()
    values, _ = candidates(logits.unsqueeze(0), block_maxima(logits.unsqueeze(0)), 900)
    _, cutoffs, _ = keep(values, torch.tensor([params], dtype=torch.float64), torch.tensor([torch.nan]))
    if min_p == 0.0 or min_p == 1.0:
        assert cutoffs.item() == cutoff_of(logits, weights, params).item()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """The statistic, and its degrees of freedom; rare outcomes are taken together."""
    common = expected >= 5
    groups = [(float(c), float(e)) for c, e in zip(counts[common], expected[common], strict=True)]
    groups.append((float(counts[~common].sum()), float(expected[~common].sum())))
    groups = [(c, e) for c, e in groups if e > 1]
    return sum((c - e) ** 2 / e for c, e in groups), len(groups) - 1


DISTRIBUTIONS = [
    {"temperature": 1.0},
    pytest.param({"temperature": 0.4}, marks=pytest.mark.slow),
    pytest.param({"temperature": 2.5}, marks=pytest.mark.slow),
    {"temperature": 1.0, "top_k": 12},
    pytest.param({"temperature": 1.3, "top_k": 500}, marks=pytest.mark.slow),
    {"temperature": 1.0, "top_p": 0.85},
    pytest.param({"temperature": 3.0, "top_p": 0.95}, marks=pytest.mark.slow),
    {"temperature": 1.0, "min_p": 0.05},
    pytest.param({"temperature": 3.0, "min_p": 0.02, "top_p": 0.97}, marks=pytest.mark.slow),
    {"temperature": 0.9, "min_p": 0.01, "top_k": 30, "top_p": 0.9},
]


@pytest.mark.parametrize("settings_of", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution(settings_of: dict[str, float]) -> None:
    """One slot draws at thousands of positions from the same logits."""
    params = SamplingParams(**settings_of)
    logits = random_logits(700, None, 3)
    bench = Bench(700)
    bench.add(sequence(params, seed=12345))
    sampler = bench.sampler._topk_topp
    count = 20_000
    index = torch.zeros(count, dtype=torch.int64)
    found = torch.zeros(700)
    for start in range(0, count, 2000):
        rows = LogitsRows(
            index[:2000].numpy(), index[:2000].numpy(), index[:2000], torch.arange(start, start + 2000), index[:2000].numpy()
        )
        found += torch.bincount(sampler.sample(logits.expand(2000, -1).contiguous(), rows).tokens, minlength=700)
    expected = probabilities(logits.double(), params)
    assert not found[expected == 0].any()
    statistic, freedom = chi_square(found, expected * count)
    # Mean and variance of the statistic are freedom and twice that; 4 deviations.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_samples_of_one_request_and_positions_differ() -> None:
    logits = torch.zeros(1, 4000)
    sampled = set()
    for seed in range(20):
        bench = Bench(4000)
        bench.add(sequence(SamplingParams(), seed=seed))
        sampled |= {int(bench.step(logits, [0]).tokens) for _ in range(3)}
    assert len(sampled) > 50


@pytest.mark.parametrize("kind", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 900, "top_p": 0.99}], ids=str)
def test_company_and_place_change_no_draw(kind: dict[str, float]) -> None:
    """Beside rows whose filters take other widths and other ways."""
    logits = torch.stack([random_logits(2000, 50, seed, 3.0) for seed in range(6)])
    others = [{"temperature": 0.0}, {"top_k": 1000}, {"top_p": 0.999}, {"top_k": 3}, {}]
    alone = Bench(2000)
    alone.add(sequence(SamplingParams(**kind), seed=77))
    expected = [int(alone.step(logits[:1], [0]).tokens) for _ in range(20)]
    together = Bench(2000)
    together.add(sequence(SamplingParams(**kind), seed=77, slot=3))
    free = [slot for slot in range(8) if slot != 3]
    for slot, other in zip(free, others, strict=False):
        together.add(sequence(SamplingParams(**other), seed=slot, slot=slot))
    found = []
    for step in range(20):
        slots = [*free[: step % 6], 3, *free[step % 6 : 5]]
        place = slots.index(3)
        batch = logits[[*range(1, place + 1), 0, *range(place + 1, 6)]]
        found.append(int(together.step(batch, slots).tokens[place]))
    assert found == expected


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 500)
    logits[0, [90, 300, 499]] = 2.0
    logits[1, [499, 498]] = 1.0
    bench = Bench(500)
    bench.add(sequence(SamplingParams(temperature=0.0), slot=0))
    bench.add(sequence(SamplingParams(temperature=1.0, top_k=1), slot=1))
    assert bench.step(logits, [0, 1]).tokens.tolist() == [90, 498]


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(300, None, 1)
    for extra in ({}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.5}):
        bench = Bench(300)
        bench.add(sequence(SamplingParams(temperature=temperature, **extra)))
        assert bench.step(logits.unsqueeze(0), [0]).tokens.item() == logits.argmax()


@pytest.mark.parametrize("kind", [{"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.005}, {"top_p": 0.97, "min_p": 0.001}], ids=str)
def test_every_way_to_the_tokens_kept_draws_the_same(kind: dict[str, float]) -> None:
    """The tokens kept come from the few best, from all tokens by a histogram, or from the whole vocabulary sorted."""
    found = []
    for width in (64, 512, 3000):
        bench = Bench(3000)
        bench.add(sequence(SamplingParams(**kind), seed=5))
        bench.sampler._topk_topp._width[:] = width
        found.append([int(bench.step(random_logits(3000, 60, step).unsqueeze(0), [0]).tokens) for step in range(40)])
    assert found[0] == found[1] == found[2]


def test_new_slots_take_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that changes hands before anything is sent has its new sequence's state, and others keep theirs."""
    bench = Bench(50)
    bench.add(sequence(SamplingParams(temperature=0.5, top_k=3), slot=2, seed=7))
    bench.sampler.send()
    sent: list[int] = []

    def counted(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        sent.append(len(array))
        return upload(array, device)

    monkeypatch.setattr("headrace.sampling.topk_topp.upload", counted)
    for slot, seed in ((0, -1), (5, 3), (0, 2**40 + 9)):
        bench.add(sequence(SamplingParams(temperature=0.0 if slot else 1.25, min_p=0.1), slot=slot, seed=seed))
    bench.sampler.send()
    bench.sampler.send()
    state = bench.sampler.sampling_state
    assert sent == [2] and state.temperatures.tolist() == [1.25, 0, 0.5, 0, 0, 0, 0, 0]
    assert [state.keys[slot].tolist() for slot in (0, 2, 5)] == [[9, 256, 0], [7, 0, 0], [3, 0, 0]]
    assert state.filters[2].tolist() == [0.5, 3, 1, 0] and state.filters[0].tolist() == [1.25, 50, 1, 0.1]
