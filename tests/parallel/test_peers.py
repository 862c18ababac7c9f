"""PeerMemory without GPUs: which kernel takes a tensor, and that results replace the input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.parallel import peers
from headrace.parallel.peers import MOST_BYTES, ONE_SHOT_BYTES, PeerMemory


class Operations:
    """Of two ranks that hold the same."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def one_shot_all_reduce_copy_out(self, shared: Any, x: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert (shared.shape, shared.dtype, op, name) == (x.shape, x.dtype, "sum", "ranks")
        self.calls.append("one")
        out.copy_(2 * x)

    def two_shot_all_reduce_(self, shared: torch.Tensor, op: str, name: str) -> None:
        self.calls.append("two")
        shared.mul_(2)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> tuple[PeerMemory, Operations]:
    operations = Operations()

    def allocate(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=dtype, device=device)

    module = SimpleNamespace(empty=allocate, rendezvous=lambda buffer, name: None)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.ops, "symm_mem", operations, raising=False)
    return PeerMemory(SimpleNamespace(group_name="ranks"), torch.device("cpu")), operations


@pytest.mark.parametrize(("count", "kernel"), [(8, "one"), (ONE_SHOT_BYTES // 4, "one"), (ONE_SHOT_BYTES // 4 + 4, "two")])
def test_the_size_chooses_the_kernel(memory: Any, count: int, kernel: str) -> None:
    peer, operations = memory
    x = torch.arange(count, dtype=torch.float32).view(4, -1)
    expected = 2 * x
    assert torch.equal(peer.all_reduce(x), expected) and operations.calls == [kernel]
    # Neither a transposed tensor nor one at an odd address is handed to a kernel.
    odd = torch.arange(count + 1, dtype=torch.float32)[1:]
    assert torch.equal(peer.all_reduce(odd), torch.arange(count + 1, dtype=torch.float32)[1:] * 2)
    assert torch.equal(peer.all_reduce(expected.t().clone().t()), 2 * expected)


def test_other_tensors_are_left_to_nccl() -> None:
    takes = PeerMemory.takes
    assert takes(torch.empty(1, 8, dtype=torch.bfloat16)) and takes(torch.empty(MOST_BYTES // 4))
    assert not takes(torch.empty(0)) and not takes(torch.empty(MOST_BYTES // 4 + 4))
    assert not takes(torch.empty(3)) and not takes(torch.empty(8, dtype=torch.float16))
