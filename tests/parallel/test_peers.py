"""PeerMemory without GPUs: which kernel takes a tensor, and what becomes of a wait in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import EngineError
from headrace.kernels.norm import ResidualNorm
from headrace.parallel import peers
from headrace.parallel.peers import MOST_BYTES, ONE_SHOT_BYTES, PeerMemory

ONE_SHOT = ONE_SHOT_BYTES[2]


class Operations:
    """Operations of two ranks that hold the same: PyTorch's operation, and the module of kernels."""

    ROWS, ROW_BYTES, EMPTY_BYTE = 256, 16 << 10, 255

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.buffers: Any = None

    def nbytes(self, size: int) -> int:
        return 64 * size

    def PeerBuffers(self, **fields: Any) -> Any:
        assert [len(one) for one in fields["ranks"]] == [128, 128]
        assert all((one == 255).all() for one in fields["ranks"])
        return SimpleNamespace(**fields)

    def peer_sum(self, x: torch.Tensor, buffers: Any, tries: int) -> torch.Tensor:
        assert x.is_contiguous() and x.ndim == 2 and not x.data_ptr() % 16 and buffers.rank == 1
        self.calls.append("one")
        return 2 * x

    def peer_sum_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, buffers: Any, tries: int) -> Any:
        self.calls.append("norm")
        return norm.add(2 * x, residual)

    def two_shot_all_reduce_(self, shared: torch.Tensor, op: str, name: str) -> None:
        assert (op, name) == ("sum", "ranks")
        self.calls.append("two")
        shared.mul_(2)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> tuple[PeerMemory, Operations]:
    operations = Operations()

    def allocate(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=dtype, device=device)

    def rendezvous(buffer: torch.Tensor, name: str) -> Any:
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: buffer.view(dtype).view(shape))

    module = SimpleNamespace(empty=allocate, rendezvous=rendezvous)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(peers, "kernels", operations)
    monkeypatch.setattr(torch.ops, "symm_mem", operations, raising=False)
    group = SimpleNamespace(group_name="ranks", size=lambda: 2, rank=lambda: 1)
    return PeerMemory(group, torch.device("cpu")), operations


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 8), "one"), ((256, 2048), "one"), ((257, 2048), "two"), ((257, 8), "two"), ((2, 4100), "two"), ((4, 2), "two")],
)
def test_the_size_chooses_the_kernel(memory: Any, shape: tuple[int, int], kernel: str) -> None:
    peer, operations = memory
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    expected = 2 * x
    assert peer.takes(x, ordered=False) and peer.takes(x, ordered=True) is (kernel == "one")
    assert torch.equal(peer.all_reduce(x.clone()), expected) and operations.calls == [kernel]
    # Neither a transposed tensor nor one at an odd address is handed to a kernel.
    odd = torch.empty(x.numel() + 1)[1:].view(shape).copy_(x)
    assert torch.equal(peer.all_reduce(odd), expected)
    assert torch.equal(peer.all_reduce(x.t().clone().t()), expected)


def test_other_tensors_are_left_to_nccl(memory: Any) -> None:
    def takes(*shape: int, dtype: torch.dtype = torch.float32) -> bool:
        return memory[0].takes(torch.empty(*shape, dtype=dtype), ordered=False)

    assert takes(1, 8, dtype=torch.bfloat16) and takes(MOST_BYTES // 4) and takes(ONE_SHOT // 4 + 4)
    assert not takes(0) and not takes(MOST_BYTES // 4 + 4)
    assert not takes(3) and not takes(8, dtype=torch.float16)


def test_the_norm_is_in_the_kernel_of_the_sum(memory: Any) -> None:
    peer, operations = memory
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    norm = ResidualNorm(torch.ones(64), 1e-6)
    assert peer.fuses(x, residual, norm)
    found, expected = peer.add_norm(x, residual, norm), norm.add(2 * x, residual)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and operations.calls == ["norm"]
    assert not peer.fuses(x, residual.double(), norm) and not peer.fuses(x.expand(300, 3, 64).reshape(900, 64), residual, norm)
    assert not peer.fuses(x, residual, norm._replace(first=torch.ones(64, dtype=torch.bfloat16)))


def test_a_wait_in_vain_fails_the_engine(memory: Any) -> None:
    peer, _ = memory
    peer.check()
    peer._buffers.alarm.fill_(1)
    with pytest.raises(EngineError, match="waited for another's part of a sum in vain"):
        peer.check()
