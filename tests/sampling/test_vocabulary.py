"""Searching wide rows by blocks equals searching them whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.vocabulary import argmax, block_maxima, candidates, pick, pick_wide

SIZES = [1, 5, 127, 128, 129, 1000, 128 * 40, 128 * 200, 15_001]


def rows(size: int, levels: int | None, seed: int = 0, count: int = 3) -> torch.Tensor:
    """Random logits; with ``levels``, so few different values that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(count, size, generator=generator)
    return torch.randint(0, levels, (count, size), generator=generator).float()


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_argmax_is_the_first_of_the_best(size: int, levels: int | None) -> None:
    logits = rows(size, levels)
    tokens, best = argmax(logits, block_maxima(logits))
    assert best.tolist() == logits.amax(-1).tolist()
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_argmax_shows_what_is_no_number() -> None:
    logits = rows(300, None)
    logits[0, 200], logits[1, 299] = torch.nan, torch.inf
    logits[2] = -torch.inf
    _, best = argmax(logits, block_maxima(logits))
    assert best[0].isnan() and best[1] == torch.inf and best[2] == -torch.inf


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from([None, 2, 50]), st.sampled_from([1, 3, 64, 100]), st.integers(0, 9))
def test_candidates_are_the_top_of_the_sorted_row(size: int, levels: int | None, count: int, seed: int) -> None:
    logits = rows(size, levels, seed)
    count = min(count, size)
    values, tokens = candidates(logits, block_maxima(logits), count)
    assert values.shape == tokens.shape == (3, count)
    for row, own_values, own_tokens in zip(logits, values, tokens, strict=True):
        ranked = sorted(range(size), key=lambda token: (-row[token].item(), token))
        assert own_values.tolist() == row[ranked[:count]].tolist()
        assert row[own_tokens].tolist() == own_values.tolist()
        above = int((row > own_values[-1]).sum())
        assert own_tokens[:above].tolist() == ranked[:above]
        assert own_tokens.unique().numel() == count
        assert sorted(own_tokens[above:].tolist()) == own_tokens[above:].tolist()


@pytest.mark.parametrize("size", [3, 200, 128 * 3])
def test_draws_follow_the_weights(size: int) -> None:
    weights = rows(size, None, count=1).exp()
    weights[0, size // 2] = 0.0
    numbers = (torch.arange(20_000).double() + 0.5) / 20_000
    for found in (
        pick(weights.double().expand(20_000, -1), numbers),
        pick_wide(weights.expand(20_000, -1), numbers),
    ):
        shares = torch.bincount(found, minlength=size) / 20_000
        assert (shares - weights[0] / weights.sum()).abs().max() < 2 / 20_000
        assert shares[size // 2] == 0


def test_the_ends_of_the_number_line_draw_what_has_weight() -> None:
    weights = torch.zeros(2, 300)
    weights[:, [70, 200]] = 1.0
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert pick_wide(weights, numbers).tolist() == [70, 200]
    assert pick(weights.double(), numbers).tolist() == [70, 200]


def test_rows_without_sense_still_give_an_index() -> None:
    """They are reported as errors later; here they must not fail."""
    weights = torch.stack((torch.full((300,), torch.nan), torch.zeros(300)))
    numbers = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for found in (pick(weights.double(), numbers), pick_wide(weights, numbers)):
        assert ((found >= 0) & (found < 300)).all()
