"""cuDNN's backend against the oracle, with graphs that compute as the formula says from the places that they are given."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_cases import layer_spec, make_case

from headrace.attention import cudnn, paged_rows
from headrace.attention.compiled import Compiling, compiling
from headrace.attention.reference import ReferenceAttention
from headrace.kernels import support

pytestmark = pytest.mark.skipif(support.refusals("cpu") == ["Triton is not installed"], reason="Triton is not installed")

GRAPHS: list[Graph] = []
ASKED: list[cudnn.CudnnKernel] = []
"""Kernels that steps asked for."""


class Tensor:
    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Tensor:
            self.given[name.removeprefix("set_")] = value
            return self

        return put


class Graph:
    """Stands in for one of cuDNN's."""

    def __init__(self, **_: Any) -> None:
        self.calls = 0
        GRAPHS.append(self)

    def tensor(self, **given: Any) -> Tensor:
        return Tensor(**given)

    def sdpa(self, **given: Any) -> tuple[Tensor, None]:
        assert given["use_padding_mask"] and given["use_causal_mask_bottom_right"] and not given["generate_stats"]
        self.asked, self.out = given, Tensor()
        return self.out, None

    def build(self, modes: list[Any]) -> None:
        assert modes

    def get_workspace_size(self) -> int:
        return 5

    def execute(self, tensors: dict[int, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        self.calls += 1
        assert len(workspace) >= 5

        def row_of(tensor: Tensor, row: int, count: int) -> torch.Tensor:
            (_, heads, most, width), (_, head, token, one) = tensor.given["dim"], tensor.given["stride"]
            assert count <= most and one == 1
            start, data = int(tensors[tensor.given["ragged_offset"].given["uid"]][row]), tensors[tensor.given["uid"]]
            return data.as_strided((count, heads, width), (token, head, 1), data.storage_offset() + start)

        lens = [tensors[self.asked[name].given["uid"]].tolist() for name in ("seq_len_q", "seq_len_kv")]
        for row, (queries, keys) in enumerate(zip(*lens, strict=True)):
            q, k, v = (row_of(self.asked[name], row, n) for name, n in (("q", queries), ("k", keys), ("v", keys)))
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * self.asked["attn_scale"]
            unseen = torch.ones(queries, keys).triu(1 + keys - queries).bool()
            weights = scores.masked_fill(unseen, float("-inf")).softmax(2)
            row_of(self.out, row, queries)[:] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cudnn")
    module.data_type = SimpleNamespace(BFLOAT16=1, HALF=2, INT32=3, FLOAT=4)
    module.heur_mode = SimpleNamespace(A=1)
    module.pygraph, module.create_handle, module.set_stream = Graph, object, lambda handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(paged_rows, "_COPY_QUERIES", 5)
    for cached in (compiling, cudnn._graph, cudnn._handle):
        cached.cache_clear()

    def compiled(kernel: cudnn.CudnnKernel) -> Compiling:
        ASKED.append(kernel)
        compiling(kernel).join(10)
        return compiling(kernel)

    monkeypatch.setattr(cudnn, "compiling", compiled)
    GRAPHS.clear()
    ASKED.clear()


def run(rows: list[tuple[int, int]], **changes: Any) -> None:
    case = make_case(layer_spec(**changes), rows, extra_tokens=2)
    oracle, backend = ReferenceAttention(), cudnn.CudnnPrefill()
    for each in (oracle, backend):
        each.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), oracle.run(case.inputs), atol=2e-5, rtol=2e-5)


def test_rows_are_where_the_graph_is_told() -> None:
    """One, and three in a graph of four, behind prefixes and without."""
    run([(11, 11)])
    run([(7, 23), (9, 9), (5, 40)], num_heads=4, head_dim=32, v_head_dim=32)
    assert [graph.calls for graph in GRAPHS] == [1, 1]
    assert [kernel.rows for kernel in dict.fromkeys(ASKED)] == [1, 4]


def test_a_short_prompt_alone_has_the_graph_that_is_built_first() -> None:
    (first,) = cudnn.CudnnPrefill.wants(layer_spec(), torch.float32, torch.device("cpu"))
    run([(11, 11)])
    assert len(ASKED) == 1 and first in ASKED


def test_lengths_share_a_graph_up_to_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_FEWEST_QUERIES", 8)
    monkeypatch.setattr(cudnn, "_FEWEST_KEYS", 16)
    for row in ((6, 11), (9, 16), (16, 16), (17, 17)):
        run([row])
    assert [(kernel.queries, kernel.keys) for kernel in dict.fromkeys(ASKED)] == [(16, 16), (64, 32)]
    assert len(GRAPHS) == 2
    case, backend = make_case(layer_spec(), [(6, 11)]), cudnn.CudnnPrefill()
    backend.plan(dataclasses.replace(case.step, longest=100))
    backend.run(case.inputs)
    assert ASKED[-1].keys == 128


def test_rows_of_few_queries_are_left_to_our_kernel() -> None:
    run([(3, 30), (4, 9)])
    assert not ASKED


def test_our_kernel_stands_in_where_no_graph_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: Graph, modes: list[Any]) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(Graph, "build", build)
    run([(11, 11)])
    assert ASKED and not GRAPHS[0].calls


def test_it_is_for_wide_heads_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn.TritonAttention, "supports", staticmethod(lambda *_: []))
    monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    wide = layer_spec(head_dim=256, v_head_dim=256)
    assert cudnn.CudnnPrefill.supports(wide, "cuda", "bfloat16") == []
    assert "heads 256 wide" in cudnn.CudnnPrefill.supports(layer_spec(), "cuda", "bfloat16")[0]
    assert "window" in cudnn.CudnnPrefill.supports(layer_spec(head_dim=256, v_head_dim=256, window=9), "cuda", "bfloat16")[0]
    monkeypatch.setattr(support, "compute_capability", lambda device: 80)
    assert "Hopper" in cudnn.CudnnPrefill.supports(wide, "cuda", "bfloat16")[0]
