"""Sums over ranks against the sum in their order. A kernel runs after the parts of the other ranks have been written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.norm import ResidualNorm
from headrace.kernels.peer_sum import triton as peer_sum
from headrace.kernels.peer_sum.triton import EMPTY_BYTE, ROW_BYTES, ROWS, PeerBuffers, nbytes
from headrace.parallel.group import ordered_sum
from kernels.closeness import close

T = TypeVar("T")
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def push_alone(x, peers, turn, rank, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr):
    channel = tl.arange(0, WIDTH_P)
    peer_sum.push(x, peers, turn, rank, tl.program_id(0), channel, channel < WIDTH, WIDTH, ROOM, SIZE)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(1, 9, shape)


def ranks(size: int, device: torch.device) -> list[PeerBuffers]:
    memory = [torch.full((nbytes(size),), EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(size)]

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return [PeerBuffers(rank, memory, zeros(ROWS), zeros(1), zeros(1)) for rank in range(size)]


def on_all(group: list[PeerBuffers], xs: list[torch.Tensor], turn: int, run: Callable[..., T]) -> list[T]:
    """Returns the result of each rank's kernel, which finds the others' parts in its memory and writes its own to copies of
    theirs."""
    rows, width = xs[0].shape
    sizes = {"WIDTH": width, "WIDTH_P": triton.next_power_of_2(width), "ROOM": ROW_BYTES // xs[0].itemsize, "SIZE": len(xs)}
    results = []
    for rank, own in enumerate(group):
        memory = own.ranks[rank]
        words = memory.view(torch.int16 if xs[0].itemsize == 2 else torch.int32)
        for other, x in enumerate(xs):
            if other != rank:
                push_alone[(rows,)](x, (words,) * len(xs), turn, other, **sizes)
        copies = [memory if place == rank else torch.empty_like(memory) for place in range(len(xs))]
        results.append(run(xs[rank], dataclasses.replace(own, ranks=copies)))
        for place, one in enumerate(copies):
            if place != rank:
                assert_pushed(one, xs[rank], turn, rank, len(xs))
        # Emptied for the sum after the next.
        assert (memory == EMPTY_BYTE).all() and own.turns[:rows].eq(1 - turn).all()
        assert not own.failed.any() and not own.alarm.any()
    return results


def assert_pushed(memory: torch.Tensor, x: torch.Tensor, turn: int, rank: int, size: int) -> None:
    """The rank's part lies in its place of another rank's memory."""
    rows, width = x.shape
    place = memory.view(x.dtype).view(peer_sum.TURNS, size, ROWS, ROW_BYTES // x.itemsize)[turn, rank, :rows, :width]
    torch.testing.assert_close(place, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_sum_alike_in_their_order(size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    group = ranks(size, device)
    for number, width in enumerate((72, 1000, 8)):
        # The interpreter rounds bfloat16 down: whole numbers need no rounding.
        xs = [torch.randn(2, width) if dtype == torch.float32 else numbers(2, width) for _ in range(size)]
        xs = [x.to(dtype).to(device) for x in xs]
        expected = ordered_sum(torch.stack(xs))
        for found in on_all(group, xs, number % 2, lambda x, own: peer_sum.peer_sum(x, own, 0)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("first", [False, True], ids=["one norm", "two norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_added_and_normed(dtype: torch.dtype, first: bool, offset: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    group, shape = ranks(2, device), (3, 200)
    # Numbers that do not cancel.
    xs = [numbers(*shape).to(dtype).to(device) for _ in range(2)]
    residual = numbers(*shape).to(dtype).to(device)
    weights = numbers(2, shape[1]).to(dtype).to(device)
    norm = ResidualNorm(weights[0], EPS, offset, weights[1] if first else None, 1e-2)
    expected, expected_total = norm.add(ordered_sum(torch.stack(xs)), residual)
    for found, total in on_all(group, xs, 0, lambda x, own: peer_sum.peer_sum_norm(x, residual, norm, own, 0)):
        close(total, expected_total, steps=2)
        close(found, expected, steps=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_an_empty_word_may_be_data(dtype: torch.dtype, device: torch.device) -> None:
    xs = [torch.zeros(1, 16, dtype=dtype, device=device) for _ in range(2)]
    xs[0].view(torch.uint8)[:] = EMPTY_BYTE
    group = ranks(2, device)
    for found in on_all(group, xs, 0, lambda x, own: peer_sum.peer_sum(x, own, 0)):
        assert found.isnan().all()


def test_a_sum_that_waits_in_vain_is_not_a_number(device: torch.device) -> None:
    own, x = ranks(2, device)[0], torch.ones(2, 16, device=device)
    for _ in range(2):
        assert peer_sum.peer_sum(x, own, 3).isnan().all()
        assert own.failed.item() == own.alarm.item() == 1


def test_rows_that_do_not_fit_are_refused(device: torch.device) -> None:
    own = ranks(2, device)[0]
    for shape in ((ROWS + 1, 8), (1, ROW_BYTES // 4 + 8)):
        with pytest.raises(ValueError, match=r"it must have at most 256 rows of at most 16384 bytes"):
            peer_sum.peer_sum(torch.zeros(shape, device=device), own, 0)
