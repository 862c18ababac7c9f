"""FlashInfer itself against the oracle, on a GPU: kernel by kernel, and captured in CUDA graphs that serve other rows."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_cases import Case, in_fp8, layer_spec, make_case, placed

from attention.test_triton import to
from headrace.attention import compiled, select
from headrace.attention.backend import AttentionInputs, LayerCache, ReplayLengths, StepMetadata
from headrace.attention.compiled import CompiledBackend
from headrace.attention.reference import ReferenceAttention
from headrace.kernels import support
from headrace.model_spec import AttentionSpec, MLASpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]

CUDA = torch.device("cuda")
PROMPT_ROWS = 16
GEOMETRIES: dict[str, dict[str, Any]] = {
    "groups of 1": {"num_heads": 4, "num_kv_heads": 4},
    "groups of 4": {"num_heads": 32, "num_kv_heads": 8},
    "groups of 5": {"num_heads": 10, "num_kv_heads": 2},
    "groups of 8": {"num_heads": 16, "num_kv_heads": 2},
    "heads of 64": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64},
    "heads of 256": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 256, "v_head_dim": 256},
    "192 and 128": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 192},
    "a window": {"num_heads": 8, "num_kv_heads": 2, "window": 37},
    "192 and 128, a window": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 192, "window": 50},
    "a soft cap": {"num_heads": 8, "num_kv_heads": 2, "soft_cap": 20.0},
}
BATCHES = (1, 2, 7, 16, 33, 64)
MLA = {"one group of 16": 16, "one group of 128": 128}


def plain(**changes: Any) -> AttentionSpec:
    return layer_spec(**{"head_dim": 128, "v_head_dim": 128, "scale": 0.1} | changes)


def compressed(heads: int) -> AttentionSpec:
    widths = {"head_dim": 576, "v_head_dim": 512, "rotary_dim": 64}
    return AttentionSpec(
        layer=0, num_heads=heads, num_kv_heads=1, scale=0.07, mla=MLASpec(head_dim=192, v_head_dim=128), **widths
    )


def case_of(spec: AttentionSpec, rows: list[tuple[int, int]], seed: int) -> Case:
    case = make_case(spec, rows, dtype=torch.bfloat16, block_size=16, seed=seed)
    case.step = dataclasses.replace(case.step, num_decode_rows=sum(count == 1 for count, _ in rows))
    if spec.mla is not None:
        shape = (len(case.q), spec.num_heads, spec.head_dim)
        case.q = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return case


def lengths(count: int, seed: int, most: int = 700) -> list[tuple[int, int]]:
    return [(1, int(length)) for length in np.random.default_rng(seed).integers(1, most, count)]


def oracle(case: Case) -> torch.Tensor:
    backend = ReferenceAttention()
    backend.plan(case.step)
    return backend.run(case.inputs)


def check(got: torch.Tensor, case: Case) -> None:
    expected = oracle(case).float().view(len(case.q), -1)
    torch.testing.assert_close(got.float().cpu().view(len(case.q), -1), expected, atol=2e-2, rtol=2e-2)


def ready(name: str, spec: AttentionSpec) -> Any:
    entry = select._entry(name, spec)
    for part in entry.parts:
        for kernel in part.wants(spec, torch.bfloat16, CUDA) if issubclass(part, CompiledBackend) else ():
            compiling = compiled.compiling(kernel)
            compiling.join(None)
            assert compiling.ready, compiling.outcome
    return entry.create()


def mixed(seed: int) -> list[tuple[int, int]]:
    return [*lengths(5, seed), (40, 40), (3, 500), (21, 90)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
def test_kernel_by_kernel(changes: dict[str, Any]) -> None:
    spec = plain(**changes)
    backend = ready("flashinfer", spec)
    for seed, rows in enumerate(
        [*(lengths(count, count) for count in BATCHES), mixed(1), [(1500, 1600), (900, 900)], [(1700, 1703)]]
    ):
        case = case_of(spec, rows, seed)
        there = to(case, CUDA)
        backend.plan(there.step)
        check(backend.run(there.inputs), case)


@pytest.mark.timeout(600)
@pytest.mark.skipif(support.compute_capability("cuda") != 90, reason="copies of numbers are for Hopper's kernel")
@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_prompts_over_fp8(width: int) -> None:
    spec = plain(head_dim=width, v_head_dim=width, num_heads=32, num_kv_heads=8)
    backend = ready("flashinfer+triton", spec)
    for seed, rows in enumerate([[(1, 300), (1500, 1600), (900, 900)], [(1700, 1703)]]):
        case = case_of(spec, rows, seed)
        stored, numbers = in_fp8(case.cache)
        there = to(dataclasses.replace(case, cache=stored), CUDA)
        backend.plan(there.step)
        check(backend.run(there.inputs), dataclasses.replace(case, cache=numbers))
        assert {wrapper.paged for wrapper in backend.prefill._wrappers._planned.values()} == {False}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", MLA.values(), ids=MLA)
def test_absorbed_rows(heads: int) -> None:
    spec = compressed(heads)
    backend = ready("flashinfer", spec)
    for seed, rows in enumerate([*(lengths(count, count) for count in (1, 7, 64)), mixed(2)]):
        case = case_of(spec, rows, seed)
        there = to(case, CUDA)
        backend.plan(there.step)
        check(backend.run(there.inputs), case)


class Graph:
    """A step of some rows as a CUDA graph, for rows of any lengths: what they are is in tensors that stay."""

    def __init__(self, backend: Any, spec: AttentionSpec, decodes: int, prompts: int, blocks: int, width: int) -> None:
        self.backend, self.decodes, self.tokens = backend, decodes, decodes + prompts
        rows = decodes + (PROMPT_ROWS if prompts else 0)
        ints = {"dtype": torch.int32, "device": CUDA}
        self.starts, self.lengths = torch.zeros(rows + 1, **ints), torch.zeros(rows, **ints)
        self.table = torch.zeros(rows, width, **ints)
        bounds = np.minimum(np.arange(rows + 1), decodes)
        bounds[decodes + 1 :] = self.tokens
        self.step = StepMetadata(
            num_decode_rows=decodes,
            query_start=self.starts,
            seq_lens=self.lengths,
            slot_mapping=(),
            block_tables=(self.table,),
            query_start_host=bounds,
            seq_lens_host=np.full(rows, 16 * width),
            bounded=True,
        )
        self.q = torch.zeros(self.tokens, spec.num_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        cache = torch.zeros(blocks, 16, spec.num_kv_heads, spec.row_width, dtype=torch.bfloat16, device=CUDA)
        self.cache = LayerCache(spec, 0, cache)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.out = self._run()

    def launch(self, case: Case) -> torch.Tensor:
        """Without waiting for the device: the outcome of the case's tokens, there."""
        step = case.step
        places, starts, held, tokens = placed(step, self.decodes, len(self.lengths))
        index = torch.from_numpy(tokens).cuda()
        table = torch.zeros(self.table.shape, dtype=torch.int32)
        table[places, : step.block_tables[0].shape[1]] = step.block_tables[0]
        self.cache.rows.zero_()
        self.cache.rows[: len(case.cache.rows)].copy_(case.cache.rows)
        self.backend.prepare_replay(ReplayLengths(self.decodes, self.tokens, starts, held))
        self.starts.copy_(torch.from_numpy(starts))
        self.lengths.copy_(torch.from_numpy(held))
        self.table.copy_(table)
        self.q.zero_()
        self.q[index] = case.q.cuda()
        self.graph.replay()
        return self.out[index].clone()

    def _run(self) -> torch.Tensor:
        self.backend.plan(self.step)
        # Several layers in turn, of which all must find the plan.
        return [self.backend.run(AttentionInputs(self.q, self.cache)) for _ in range(3)][-1]


def replayed(spec: AttentionSpec) -> None:
    """Graphs of several shapes, launched one behind the other before any outcome is looked at."""
    backend = ready("flashinfer", spec)
    shapes = [(1, 0), (8, 0), (64, 0), (8, 64), (0, 128)]
    graphs = {shape: Graph(backend, spec, *shape, blocks=3000, width=64) for shape in shapes}
    asked = [
        ((64, 0), lengths(64, 1)),
        ((64, 0), lengths(33, 2)),
        ((1, 0), lengths(1, 3, 1000)),
        ((8, 0), lengths(7, 4)),
        ((8, 64), [*lengths(5, 5), (40, 40), (3, 500), (21, 90)]),
        ((8, 64), [*lengths(8, 6), (1 + 1, 700)]),
        ((0, 128), [(128, 900)]),
        ((0, 128), [(17, 17), (30, 333), (2, 2)]),
        ((8, 0), lengths(8, 7)),
        ((64, 0), lengths(64, 8)),
    ]
    cases = [case_of(spec, rows, seed) for seed, (_, rows) in enumerate(asked)]
    found = [graphs[shape].launch(case) for (shape, _), case in zip(asked, cases, strict=True)]
    for got, case in zip(found, cases, strict=True):
        check(got, case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
def test_graphs(changes: dict[str, Any]) -> None:
    replayed(plain(**changes))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", MLA.values(), ids=MLA)
def test_graphs_of_absorbed_rows(heads: int) -> None:
    replayed(compressed(heads))
