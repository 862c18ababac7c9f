"""Sparse prompts over copies of keys and values, with dense heads by FlashInfer: the same tokens as over the cache itself."""

from __future__ import annotations

import pytest
import torch
from support.fake_flashinfer import Device, flashinfer
from support.runner.harness import alone, same
from support.runner.sparse_world import SparseWorld, elastic

from headrace.attention import compiled, sparse
from headrace.attention.flashinfer import heads, kernels
from headrace.kernels import support
from runner.parts.test_sparse import MODES, expected, run, traffic

__all__ = ["flashinfer"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretends to be a GPU that loads tiles, and returns the keys of each copy."""
    made: list[int] = []
    real = sparse.PagedRows.copies

    def counted(self: sparse.PagedRows, *args: object) -> torch.Tensor:
        made.append(self.num_keys)
        return real(self, *args)

    monkeypatch.setattr(sparse, "loads_tiles", lambda q: True)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 1)
    monkeypatch.setattr(sparse.PagedRows, "copies", counted)
    return made


@pytest.mark.parametrize("mode", ["elastic", pytest.param("mean", marks=pytest.mark.slow)])
def test_copies_change_nothing(mode: str, copies: list[int]) -> None:
    same(run(MODES[mode], traffic())[1], expected(mode))
    assert copies


HEADS = [("full", "streaming"), ("xattn", "streaming"), pytest.param("full", "xattn", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("retrieval", "toggle"), HEADS)
def test_heads_by_flashinfer(
    retrieval: str, toggle: str, copies: list[int], flashinfer: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head of a row is one kernel's alone: heads that fa3 skips would be left as they were."""
    world = SparseWorld(elastic=elastic(retrieval, toggle))
    requests = traffic()[:3]
    wanted = alone(world, requests)
    assert not flashinfer.wrappers
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    monkeypatch.setattr(kernels, "refusals", lambda *args: [])
    monkeypatch.setattr(heads, "_QUERIES", 100)
    for layer in world.spec.layers:
        compiled.compiling(kernels.for_prompts(layer, torch.float32, torch.device("cpu"))).join(600)
    selecting: list[object] = []
    attend = sparse.sparse_prefill_attention
    monkeypatch.setattr(
        sparse, "sparse_prefill_attention", lambda *args, **kw: selecting.append(args[0]) or attend(*args, **kw)
    )
    same(alone(world, requests), wanted)
    assert flashinfer.wrappers and copies
    long = [q for q in selecting if len(q) >= 100]
    assert bool(long) == ("xattn" in (retrieval, toggle)), "no launch is for no head"


@pytest.mark.parametrize(("tokens", "length"), [(1000, 1000), (1024, 1024), (300, 1196), (100, 100)])
@pytest.mark.parametrize(("sinks", "local"), [(1, 2), (2, 1), (0, 3), (3, 20)])
def test_pages_of_streaming_heads(tokens: int, length: int, sinks: int, local: int) -> None:
    query_start, page_start, pages, last = heads.streamed_pages(tokens, length, 128, sinks, local)
    for number, own in enumerate(range((length - tokens) // 128, -(-length // 128))):
        seen = [block for block in range(own + 1) if block < sinks or block > own - local]
        assert pages[page_start[number] : page_start[number + 1]].tolist() == seen
        assert last[number] == min(128, length - own * 128) == query_start[number + 1] - query_start[number]
    assert query_start[-1] == tokens
