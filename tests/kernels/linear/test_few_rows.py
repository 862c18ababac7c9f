"""Products that the kernel for few rows computes."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels import support
from headrace.kernels.linear import few_rows

SIZES = [(4096, 4096), (4096, 12288), (24576, 4096), (1024, 4096)]
"""(outputs, inputs)"""


def factors(rows: int, dtype: torch.dtype = torch.bfloat16, size_in: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, size_in, dtype=dtype), torch.empty(64, size_in, dtype=dtype)


def test_rows_by_the_size_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "FEW_ROWS", ((64 * 32, 8), (64 * 48, 2)))
    small, middle, large = 32, 48, 64
    assert [few_rows(*factors(rows, size_in=small)) for rows in (0, 1, 8, 9)] == [False, True, True, False]
    assert [few_rows(*factors(rows, size_in=middle)) for rows in (0, 1, 2, 3)] == [False, True, True, False]
    assert not few_rows(*factors(1, size_in=large))


def test_several_rows_of_what_is_read_slowly_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "FEW_ROWS", ((1 << 20, 8),))
    assert few_rows(*factors(4))
    assert few_rows(*factors(1, torch.float32))
    assert not few_rows(*factors(4, torch.float32))
    assert few_rows(*factors(1, size_in=40))
    assert not few_rows(*factors(4, size_in=40))
    x, weight = factors(4)
    assert not few_rows(torch.empty(4, 40, dtype=x.dtype)[:, :32], weight)


def test_products_that_cublaslt_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "is_hopper", lambda device: True)
    square, deep, long, small = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in SIZES)
    assert [product.chosen_by_lt(rows, square) for rows in (64, 65, 512, 513)] == [False, True, True, False]
    assert [product.chosen_by_lt(rows, deep) for rows in (65, 128, 192, 256)] == [True, False, True, False]
    assert not product.chosen_by_lt(65, long) and not product.chosen_by_lt(65, small)
