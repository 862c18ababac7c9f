"""Low-rank products of tokens with one adapter or another: the kernel and its reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.lora import triton as kernels
from headrace.kernels.lora.reference import LowRank, Segment, expand, shrink

NONE = -1


def add_by_kernel(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: list[int],
    places: torch.Tensor,
    *,
    batch_invariant: bool = False,
) -> None:
    low = kernels.shrink(x, a, places, batch_invariant=batch_invariant)
    kernels.expand(LowRank(low, b, ends, (), places), places, y, batch_invariant=batch_invariant)


def case(
    places: list[int],
    parts: tuple[int, ...],
    channels: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    count: int = 3,
) -> tuple[torch.Tensor, ...]:
    """y, x, a, b and places."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    tokens = len(places)
    a, b = random(count, len(parts) * rank, channels), random(count, sum(parts), rank)
    return random(tokens, sum(parts)), random(tokens, channels), a, b, torch.tensor(places, dtype=torch.int32, device=device)


def ends_of(parts: tuple[int, ...]) -> list[int]:
    return [sum(parts[: index + 1]) for index in range(len(parts))]


def expected(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, places: torch.Tensor, parts: tuple[int, ...]
) -> torch.Tensor:
    """Token by token, in float64."""
    result, rank = y.double(), b.shape[2]
    for token, place in enumerate(places.tolist()):
        first = 0
        for part, end in enumerate(ends_of(parts)):
            if place != NONE:
                low = a[place, part * rank : (part + 1) * rank].double() @ x[token].double()
                result[token, first:end] += b[place, first:end].double() @ low
            first = end
    return result


@pytest.mark.parametrize("parts", [(40,), (24, 8, 16), (20, 20)])
def test_the_reference(parts: tuple[int, ...]) -> None:
    places = [NONE, 2, 2, 0, NONE, 1, 1, 1]
    y, x, a, b, on_device = case(places, parts, 30, 4, torch.float32, torch.device("cpu"))
    wanted = expected(y, x, a, b, on_device, parts)
    before = y.clone()
    segments = [Segment(1, 3, 2), Segment(3, 4, 0), Segment(5, 8, 1)]
    expand(LowRank(shrink(x, a, segments), b, ends_of(parts), segments, None), y)
    assert torch.allclose(y.double(), wanted, atol=1e-4)
    assert torch.equal(y[[0, 4]], before[[0, 4]])


CASES = {
    "decode": ([0], (40,), 30, 4),
    "mixed": ([NONE, 2, 2, 0, NONE, 1, 1, 1, 2, NONE], (24, 8, 16), 600, 4),
    "gate and up": ([1, 0, NONE] * 7, (150, 150), 1200, 8),
    "rank": ([0, 2], (130,), 70, 72),
    "prompt": ([0] * 130 + [NONE] * 70 + [2] * 100, (20, 20), 130, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name: str, dtype: torch.dtype, device: torch.device) -> None:
    places, parts, channels, rank = CASES[name]
    y, x, a, b, on_device = case(places, parts, channels, rank, dtype, device)
    wanted, before = expected(y, x, a, b, on_device, parts), y.clone()
    add_by_kernel(y, x, a, b, ends_of(parts), on_device)
    scale = wanted.abs().amax()
    assert (y.double() - wanted).abs().amax() < (1e-5 if dtype == torch.float32 else 2e-2) * scale
    base = on_device == NONE
    assert torch.equal(y[base], before[base])


def test_products_with_a_that_are_rounded(device: torch.device) -> None:
    """Compares tokens with an adapter alone: what the others get is not defined."""
    places, parts, channels, rank = CASES["gate and up"]
    _, x, a, _, on_device = case(places, parts, channels, rank, torch.bfloat16, device)
    low, held = kernels.shrink_rounded(x, a, on_device), on_device != NONE
    wanted = torch.einsum("tk,twk->tw", x[held].double(), a[on_device[held].long()].double())
    assert low.dtype == torch.bfloat16 and low.shape == (len(x), 2 * rank)
    assert (low[held].double() - wanted).abs().amax() < 8e-3 * wanted.abs().amax()


def test_a_token_depends_on_no_other(device: torch.device) -> None:
    places, parts = [0, 1, NONE, 2] * 6, (32, 16)
    y, x, a, b, on_device = case(places, parts, 560, 8, torch.bfloat16, device)
    x[3] = float("inf")  # A token that is broken spoils none of the others.
    alone = y[:1].clone()
    add_by_kernel(alone, x[:1], a, b, ends_of(parts), on_device[:1], batch_invariant=True)
    add_by_kernel(y, x, a, b, ends_of(parts), on_device, batch_invariant=True)
    assert torch.equal(y[:1], alone)
    others = torch.arange(len(y), device=y.device) != 3
    assert y[others].isfinite().all() and not y[3].isfinite().all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    y, x, a, b, places = case([0, 1], (16,), 16, 4, torch.float32, torch.device("cpu"))
    for wrong in (
        (y, x[:1], a, b, [16], places),
        (y, x, a, b, [8], places),
        (y, x, a, b, [4, 8, 12, 16], places),
        (y, x, a, b, [16], places[:1]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            add_by_kernel(*wrong)
    with pytest.raises(ValueError, match="contiguous"):
        add_by_kernel(y, x.double(), a, b, [16], places)
