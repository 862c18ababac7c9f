"""The checker of interpreted kernels' memory finds what it is for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels import support

from .memory import Checker, OutOfBoundsError

pytestmark = pytest.mark.skipif(not support.interpreted(), reason="kernels are compiled here")


@triton.jit
def _copy(source, target, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place, mask=place < count, other=0), mask=place < count)


@triton.jit
def _add(target, place):
    tl.atomic_add(target + place, 1)


@pytest.mark.parametrize(("given", "asked"), [(5, 5), (8, 5), (8, 8), (0, 0)])
def test_what_is_inside_passes(given: int, asked: int) -> None:
    source, target = torch.arange(given), torch.zeros(given, dtype=torch.int64)
    with Checker().on() as checker:
        _copy[(1,)](source, target, asked, SIZE=8)
    assert checker.accesses == (2 if asked else 0)
    assert target.tolist() == [*range(asked), *[0] * (given - asked)]


@pytest.mark.parametrize(("source", "target", "does"), [(4, 5, "_copy reads"), (5, 4, "_copy writes")])
def test_what_is_outside_does_not(source: int, target: int, does: str) -> None:
    with pytest.raises(Exception, match=does), Checker().on():
        _copy[(1,)](torch.arange(source), torch.zeros(target, dtype=torch.int64), 5, SIZE=8)


def test_atomics_are_watched() -> None:
    counts = torch.zeros(3, dtype=torch.int32)
    with Checker().on():
        _add[(1,)](counts, 2)
        with pytest.raises(Exception, match="_add adds to"):
            _add[(1,)](counts, 3)
    assert counts.tolist() == [0, 0, 1] and issubclass(OutOfBoundsError, AssertionError)


def test_a_view_is_its_whole_storage() -> None:
    whole = torch.arange(10)
    with Checker().on():
        _copy[(1,)](whole[4:5], torch.zeros(6, dtype=torch.int64), 6, SIZE=8)
