"""Sparse prompts over copies of keys and values, with dense heads by FlashInfer: the same tokens as over the cache itself."""

from __future__ import annotations

import pytest
import torch
from attention.fake_flashinfer import Device, flashinfer

from headrace.attention import sparse
from headrace.attention.flashinfer import dense_heads, kernels
from headrace.kernels import support

from .harness import alone, same
from .sparse_world import SparseWorld, elastic
from .test_sparse import MODES, expected, run, traffic

__all__ = ["flashinfer"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU that loads tiles; the keys of each copy."""
    made: list[int] = []
    real = sparse.PagedRows.copies

    def counted(self: sparse.PagedRows, *args: object) -> torch.Tensor:
        made.append(self.num_keys)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sparse, "loads_tiles", lambda q: True)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 1)
    monkeypatch.setattr(sparse.PagedRows, "copies", counted)
    return made


@pytest.mark.parametrize("mode", ["elastic", pytest.param("mean", marks=pytest.mark.slow)])
def test_copies_change_nothing(mode: str, copies: list[int]) -> None:
    same(run(MODES[mode], traffic())[1], expected(mode))
    assert copies


@pytest.mark.parametrize("toggle", ["streaming", pytest.param("xattn", marks=pytest.mark.slow)])
def test_dense_heads_by_flashinfer(toggle: str, copies: list[int], flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head of a row is one kernel's alone: heads that fa3 skips would be left as they were."""
    world = SparseWorld(elastic=elastic("full", toggle))
    requests = traffic()[:3]
    wanted = alone(world, requests)  # type: ignore[arg-type]
    assert not flashinfer.wrappers
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    monkeypatch.setattr(kernels, "refusals", lambda *args: [])
    monkeypatch.setattr(dense_heads, "_QUERIES", 100)
    for layer in world.spec.layers:
        kernels.compiling(kernels.for_prompts(layer, torch.float32, torch.device("cpu"))).join(600)
    same(alone(world, requests), wanted)  # type: ignore[arg-type]
    assert flashinfer.wrappers and copies
