"""Blocks without gaps against their ref, and by hand."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.pages import reference as ref
from headrace.kernels.pages import triton as pages


def test_the_reference_by_hand() -> None:
    table = torch.tensor([[5, 6, 0], [7, 0, 0], [8, 9, 4]], dtype=torch.int32)
    out = torch.full((8,), -1, dtype=torch.int32)
    ref.gather_pages(table, torch.tensor([0, 2, 3, 6], dtype=torch.int32), out)
    assert out.tolist() == [5, 6, 7, 8, 9, 4, -1, -1]


@pytest.mark.parametrize("counts", [[3, 1, 0, 40], [1], [0, 0], [2100, 1, 1500], [1] * 70], ids=str)
@pytest.mark.parametrize("wide", [0, 3])
def test_matches_the_ref(counts: list[int], wide: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(1, 9999, (len(counts), max(*counts, 1) + wide + 5), generator=generator, dtype=torch.int32)
    table = whole[:, : whole.shape[1] - 5]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    got, expected = (torch.full((sum(counts) + 4,), -1, dtype=torch.int32) for _ in range(2))
    ref.gather_pages(table, starts, expected)
    there = got.to(device)
    pages.gather_pages(whole.to(device)[:, : table.shape[1]], starts.to(device), there)
    assert torch.equal(there.cpu(), expected)


def test_rows_of_more_blocks_than_the_table_has(device: torch.device) -> None:
    table = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    for module, place in ((ref, torch.device("cpu")), (pages, device)):
        out = torch.zeros(6, dtype=torch.int32, device=place)
        module.gather_pages(table.to(place), starts.to(place), out)
        assert out.tolist() == [5, 6, 0, 0, 7, 0]
