"""Choices of an indexer, and attention to what it chose, against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.indexer import ChoiceRule, reference
from headrace.kernels.indexer.triton_attention import attend_chosen
from headrace.kernels.indexer.triton_choice import choose
from kernels.closeness import close

from .cases import GEOMETRIES, Geometry, world


@pytest.mark.parametrize("at_once", [2048, 16], ids=["whole lists", "lists in parts"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_choice_is_the_reference_s(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr("headrace.kernels.indexer.triton_choice._AT_ONCE", at_once)
    one = GEOMETRIES[name]
    here = world(one)
    wanted = reference.choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule)
    there = here.to(device)
    got = choose(there.q, there.weights, there.index_keys, there.table, there.places, one.rule)
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    [
        *(("tokens", False), ("blocks", True)),
        *(pytest.param(name, name != "tokens", marks=pytest.mark.slow) for name in ("odd blocks", "all are local")),
        *(pytest.param(name, name == "tokens", marks=pytest.mark.slow) for name in GEOMETRIES),
    ],
)
def test_attention_is_the_reference_s(name: str, batch_invariant: bool, device: torch.device) -> None:
    one = GEOMETRIES[name]
    here = world(one)
    chosen = reference.choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule)
    given = (here.heads_q, here.keys, here.values, here.table, here.places, chosen, one.rule)
    wanted = reference.attend_chosen(*given, scale=0.3)
    there = here.to(device)
    given = (there.heads_q, there.keys, there.values, there.table, there.places, chosen.to(device), one.rule)
    got = attend_chosen(*given, scale=0.3, batch_invariant=batch_invariant)
    close(got, wanted, steps=16)
    assert not got[-1].any()


@pytest.mark.parametrize("at_once", [2048, 16], ids=["whole lists", "lists in parts"])
def test_of_equal_scores_the_first_ones_win(at_once: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Both zeros are one score."""
    monkeypatch.setattr("headrace.kernels.indexer.triton_choice._AT_ONCE", at_once)
    one = Geometry(ChoiceRule(6), 1, 16, True, 2, 1, 16, 16)
    here = world(one, ((1, 40),))
    # Products are 1 or -1: where they are positive, all scores are the weight, and all others 0.
    first = here.index_keys.nan_to_num(0.0)[..., :1].sign()
    here.index_keys.copy_(first * torch.eye(16)[0])
    here.q.copy_(torch.eye(16)[0])
    positive = first.flatten(0, 1).squeeze(1) > 0
    order = (here.table[0, :10].long()[:, None] * 4 + torch.arange(4)).flatten()
    there = here.to(device)
    for weight in (1.0, -1.0):
        weights = torch.full((2, 1), weight)
        best = positive[order] if weight > 0 else ~positive[order]
        wanted = sorted(torch.arange(40)[best].tolist()[:6])
        assert len(wanted) == 6
        for function, given in ((reference.choose, here), (choose, there)):
            where = given.q.device
            got = function(given.q, weights.to(where), given.index_keys, given.table, given.places, one.rule)
            assert got[0, 0].tolist() == wanted


@pytest.mark.skipif(not support.interpreted(), reason="a launch of several parts takes little memory to see")
def test_scores_that_do_not_fit_are_made_in_parts(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    one = GEOMETRIES["tokens"]
    here = world(one)
    wanted = reference.choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule)
    monkeypatch.setattr("headrace.kernels.indexer.triton_choice._SPACE", 3 * 40)
    got = choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule)
    assert torch.equal(got, wanted)
    monkeypatch.setattr("headrace.kernels.indexer.reference._SPACE", 500)
    assert torch.equal(reference.choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule), wanted)


def test_many_scores_are_read_in_turns(device: torch.device) -> None:
    """More than a program of the choice reads at a time, and more than it chooses at a time."""
    one = Geometry(ChoiceRule(2100), 1, 16, True, 2, 1, 16, 16)
    here = world(one, ((1, 2300),), block_size=16)
    wanted = reference.choose(here.q, here.weights, here.index_keys, here.table, here.places, one.rule)
    there = here.to(device)
    got = choose(there.q, there.weights, there.index_keys, there.table, there.places, one.rule)
    assert (got.cpu() != wanted).sum() <= 2
