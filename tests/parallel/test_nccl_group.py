"""Collectives that an NcclGroup leaves to PeerMemory, without GPUs: two ranks hold the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels.norm import ResidualNorm
from headrace.parallel import group as module
from headrace.parallel.group import NcclGroup, ordered_sum

DONE = SimpleNamespace(wait=lambda: None)


class Collectives:
    """Stands for NCCL."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        tensors[0].mul_(2)
        return DONE

    def _allgather_base(self, gathered: torch.Tensor, x: torch.Tensor) -> Any:
        gathered.copy_(torch.stack([x, x]))
        return DONE


class Peers:
    """Stands for PeerMemory, for up to 4096 elements in order and 8192 in any."""

    factor = 2

    def __init__(self, group: Any, device: torch.device) -> None:
        self.patient = True
        self.calls: list[str] = []

    def most_rows(self, width: int) -> int:
        return 4

    def takes(self, x: torch.Tensor, *, ordered: bool) -> bool:
        return x.numel() <= (4096 if ordered else 8192)

    def fuses(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> bool:
        return x.numel() <= 4096

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("sum" if self.patient else "trial")
        return x * self.factor

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm) -> Any:
        self.calls.append("norm")
        return norm.add(2 * x, residual)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    made = NcclGroup.__new__(NcclGroup)
    made.rank, made.size, made._ordered, made._device = 0, 2, False, torch.device("cpu")
    made._group, made._peers = Collectives(), None
    monkeypatch.setattr(module, "PeerMemory", Peers)
    return made


@pytest.mark.parametrize("ordered", [False, True])
def test_sizes_choose_the_transport(group: NcclGroup, ordered: bool) -> None:
    group._ordered = ordered
    assert group._try_peers()[0] == f"symmetric memory up to {2048 if ordered else 8192} KiB, then NCCL"
    peers: Any = group._peers
    assert peers.calls == ["trial"] * 3
    norm, calls = ResidualNorm(torch.ones(1024), 1e-6), {4: "norm", 8: "" if ordered else "sum", 16: ""}
    for rows, call in calls.items():
        peers.calls = []
        x, residual = torch.randn(rows, 1024), torch.randn(rows, 1024)
        found, total = group.add_norm(x.clone(), residual, norm)
        expected = norm.add(ordered_sum(torch.stack([x, x])), residual)
        assert torch.equal(found, expected[0]) and torch.equal(total, expected[1])
        assert peers.calls == ([call] if call else [])


def test_memory_that_cannot_be_mapped_is_left_alone(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: Any, device: torch.device) -> Any:
        raise RuntimeError("no peer access\nand more")

    monkeypatch.setattr(module, "PeerMemory", refuse)
    assert group._try_peers() == ("NCCL", "symmetric memory cannot be used: RuntimeError: no peer access")
    assert group._peers is None


@pytest.mark.parametrize("sums", ["other numbers", "an error"])
def test_wrong_sums_are_left_to_nccl(group: NcclGroup, monkeypatch: pytest.MonkeyPatch, sums: str) -> None:
    monkeypatch.setattr(Peers, "factor", 3 if sums == "other numbers" else "x")
    assert group._try_peers() == ("NCCL", "sums through symmetric memory are wrong on this machine")
    assert group._peers is None
    assert torch.equal(group.all_reduce(torch.ones(4)), torch.full((4,), 2.0))
