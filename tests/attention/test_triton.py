"""The Triton backend against the oracle, through the protocol."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.attention_cases import Case, in_fp8, layer_spec, make_case, with_ends

from headrace.attention import select, triton
from headrace.attention.reference import ReferenceAttention
from headrace.attention.triton import InvariantAttention, TritonAttention
from headrace.kernels import support

pytestmark = pytest.mark.skipif(support.refusals("cpu") == ["Triton is not installed"], reason="Triton is not installed")

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

MIXED = [(1, 9), (1, 40), (1, 1), (7, 7), (5, 23), (1, 12)]


def to(case: Case, device: torch.device) -> Case:
    step = dataclasses.replace(
        case.step,
        query_start=case.step.query_start.to(device),
        seq_lens=case.step.seq_lens.to(device),
        block_tables=tuple(table.to(device) for table in case.step.block_tables),
        visible_ends=None if case.step.visible_ends is None else case.step.visible_ends.to(device),
    )
    cache = dataclasses.replace(case.cache, rows=case.cache.rows.to(device))
    return Case(case.q.to(device), cache, step, None if case.sinks is None else case.sinks.to(device))


def decode_first(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Orders rows like a step: ``make_case`` counts rows of one query as decode."""
    return sorted(rows, key=lambda row: row[0] > 1)


def run(backend: TritonAttention | ReferenceAttention, case: Case) -> torch.Tensor:
    backend.plan(case.step)
    return backend.run(case.inputs)


def check(case: Case, device: torch.device, tolerance: float = 2e-5) -> None:
    expected = run(ReferenceAttention(), case)
    got = run(TritonAttention(), to(case, device)).cpu()
    assert got.dtype == case.q.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 10, "head_dim": 24, "v_head_dim": 8},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
        {"window": 6},
        {"window": 6, "chunked": True},
        {"soft_cap": 2.0, "sinks": True},
        {"window": 20, "soft_cap": 5.0, "sinks": True, "num_heads": 2},
    ],
    ids=str,
)
def test_mixed_steps(changes: dict[str, object], device: torch.device) -> None:
    check(make_case(layer_spec(**changes), decode_first(MIXED), block_size=8), device)


def test_decode_rows_take_the_tilings_of_graphs(device: torch.device) -> None:
    """The capture of graphs has compiled the kernels, with rows of any length."""
    chosen = []
    for lengths in ((1, 1, 1), (9, 40, 12), (400, 40, 30, 2)):
        case = to(make_case(layer_spec(), [(1, length) for length in lengths], block_size=8), device)
        step = dataclasses.replace(case.step, longest=1024)
        backend = TritonAttention()
        expected = run(ReferenceAttention(), case)
        torch.testing.assert_close(run(backend, dataclasses.replace(case, step=step)), expected, atol=2e-5, rtol=2e-5)
        chosen += backend._tilings.values()
    assert len(chosen) == 3 and len(set(chosen)) == 1 and chosen[0].splits > 1


@pytest.mark.parametrize("backend", [TritonAttention, InvariantAttention])
@pytest.mark.parametrize("changes", [{}, {"window": 6, "sinks": True, "soft_cap": 2.0}], ids=str)
def test_visible_ends(changes: dict[str, object], backend: type[TritonAttention], device: torch.device) -> None:
    """Decode rows, a prompt with spans side by side, and a chunk whose span ends with it."""
    case = make_case(layer_spec(**changes), [(1, 9), (1, 40), (21, 21), (7, 30)], block_size=8)
    case = with_ends(case, [(2, 0, 9), (2, 9, 14), (3, 25, 30)])
    got = run(backend(), to(case, device)).cpu()
    torch.testing.assert_close(got, run(ReferenceAttention(), case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [[(1, 30)], [(1, 3)] * 5, [(20, 20)], [(3, 30), (1, 7)]], ids=str)
def test_one_kind_of_rows(rows: list[tuple[int, int]], device: torch.device) -> None:
    """The last has a prompt's one-token chunk behind a longer one: nothing but the batch's order makes it prefill."""
    case = make_case(layer_spec(), rows, block_size=8)
    if rows[0][0] > 1:
        case.step = dataclasses.replace(case.step, num_decode_rows=0)
    check(case, device)


def test_decode_rows_of_several_queries(device: torch.device) -> None:
    """One and the tokens that were guessed behind it: rows are not as many as their queries."""
    case = make_case(layer_spec(), [(3, 9), (1, 40), (4, 21), (7, 23)], block_size=8)
    case.step = dataclasses.replace(case.step, num_decode_rows=3)
    check(case, device)


def test_half_precision(device: torch.device) -> None:
    check(make_case(layer_spec(), decode_first(MIXED), dtype=torch.float16, block_size=8), device, 4e-3)


@pytest.mark.gpu
@on_cuda
def test_bfloat16() -> None:
    check(make_case(layer_spec(), decode_first(MIXED), dtype=torch.bfloat16, block_size=8), torch.device("cuda"), 2e-2)


def test_fp8_caches(device: torch.device) -> None:
    case = make_case(layer_spec(head_dim=32, v_head_dim=16), decode_first(MIXED), block_size=8)
    plain = case.cache
    stored, numbers = in_fp8(plain)
    torch.testing.assert_close(numbers.rows, plain.rows, rtol=1 / 16, atol=0.01)
    expected = run(ReferenceAttention(), dataclasses.replace(case, cache=numbers))
    got = run(TritonAttention(), to(dataclasses.replace(case, cache=stored), device)).cpu()
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=4e-3)


def test_padding(device: torch.device) -> None:
    """Padding rows, tables wider than needed, tokens behind the last row: zeros, and no other row is touched."""
    case = make_case(layer_spec(), [(1, 9), (1, 20), (1, 0), (1, 0)], wide=5, extra_tokens=3, block_size=8)
    got = run(TritonAttention(), to(case, device)).cpu()
    torch.testing.assert_close(got[:2], run(ReferenceAttention(), case)[:2], atol=2e-5, rtol=2e-5)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


def test_an_empty_step(device: torch.device) -> None:
    case = make_case(layer_spec(), [])
    assert run(TritonAttention(), to(case, device)).shape == (0, 96)


@pytest.mark.parametrize("bound", [64, 5000])
def test_lengths_on_the_host_may_be_bounds(bound: int, device: torch.device) -> None:
    """A captured graph has the number of splits of the longest row that there can be."""
    case = make_case(layer_spec(), [(1, 9), (1, 40), (1, 1)], block_size=8)
    expected = run(ReferenceAttention(), case)
    case.step = dataclasses.replace(case.step, seq_lens_host=np.full(3, bound, dtype=np.int32))
    torch.testing.assert_close(run(TritonAttention(), to(case, device)).cpu(), expected, atol=2e-5, rtol=2e-5)


def test_layers_of_different_geometry_share_an_instance(device: torch.device) -> None:
    """And a workspace, which stays in its place from the first step on."""
    narrow = make_case(layer_spec(), [(1, 300)], block_size=8)
    wide = make_case(layer_spec(num_heads=4, num_kv_heads=1, head_dim=40, v_head_dim=24, window=11), [(1, 300)], block_size=8)
    wide.step = narrow.step = dataclasses.replace(
        narrow.step, block_tables=(*narrow.step.block_tables, *wide.step.block_tables)
    )
    wide.cache = dataclasses.replace(wide.cache, group=1)
    backend = TritonAttention()
    places = set()
    for _ in range(2):
        for case in (narrow, wide):
            got = run(backend, to(case, device)).cpu()
            torch.testing.assert_close(got, run(ReferenceAttention(), case), atol=2e-5, rtol=2e-5)
            places.add(backend._workspace.data_ptr())
    assert len(places) == 1 and backend._workspace.numel() > 0


def check_invariance(together: Case, device: torch.device, tolerance: float) -> None:
    """Bitwise: a row in a batch, and alone; decode, and the same token in a chunk."""
    expected = run(InvariantAttention(), to(together, device)).cpu()
    torch.testing.assert_close(expected, run(ReferenceAttention(), together), atol=tolerance, rtol=tolerance)
    for row, tokens in ((0, slice(0, 1)), (2, slice(2, 8)), (2, slice(7, 8))):
        count = tokens.stop - tokens.start
        alone = dataclasses.replace(
            together.step,
            num_decode_rows=int(count == 1),
            query_start=torch.tensor([0, count], dtype=torch.int32),
            query_start_host=np.array([0, count], dtype=np.int32),
            seq_lens=together.step.seq_lens[row : row + 1],
            seq_lens_host=together.step.seq_lens_host[row : row + 1],
            block_tables=(together.step.block_tables[0][row : row + 1],),
        )
        case = Case(together.q[tokens], together.cache, alone, together.sinks)
        assert torch.equal(run(InvariantAttention(), to(case, device)).cpu(), expected[tokens])


def test_invariance(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INVARIANT_SPLIT", 32)
    rows = [(1, 60), (1, 9), (6, 41)]
    check_invariance(make_case(layer_spec(sinks=True), rows, dtype=torch.float16, block_size=8), device, 4e-3)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("length", [41, 400, 5000])
def test_invariance_of_both_kernels(length: int) -> None:
    """Decode rows have one in CUDA C++ on Hopper, a chunk has Triton's."""
    spec = layer_spec(num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128)
    case = make_case(spec, [(1, 60), (1, 9), (6, length)], dtype=torch.bfloat16, block_size=16)
    check_invariance(case, torch.device("cuda"), 2e-2)


@pytest.mark.gpu
@pytest.mark.captures
@on_cuda
def test_graphs_and_no_waiting() -> None:
    """Neither plan nor run waits for the device; what is captured once holds for other lengths."""
    device = torch.device("cuda")
    case = make_case(layer_spec(), [(1, 9), (1, 400), (1, 33)], block_size=16)
    case.step = dataclasses.replace(case.step, seq_lens_host=np.full(3, 1000, dtype=np.int32))
    there, backend = to(case, device), TritonAttention()
    run(backend, there)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(backend, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(backend, there)
    for lengths in ([9, 400, 33], [3, 17, 1], [9, 0, 32]):
        there.step.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        case.step = dataclasses.replace(
            case.step, seq_lens=torch.tensor(lengths), seq_lens_host=np.array(lengths, dtype=np.int32)
        )
        torch.testing.assert_close(captured.cpu(), run(ReferenceAttention(), case), atol=2e-5, rtol=2e-5)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(device: str = "cpu", dtype: str = "float32", **rest: object) -> list[str]:
        modes = rest.pop("modes", frozenset())
        return TritonAttention.supports(layer_spec(**rest), device, dtype, None, modes)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reasons() == []
    assert "bfloat16" in reasons(dtype="bfloat16")[0]
    assert "float64" in reasons(dtype="float64")[0]
    assert reasons(modes=frozenset({"visible_ends"})) == []
    assert reasons(modes=frozenset({"sparse", "visible_ends"})) == ["it has no mode sparse"]
    assert "1024 wide" in reasons(head_dim=2048)[0]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "not on cpu" in reasons()[0]
    monkeypatch.setattr(support, "compute_capability", lambda device: None)
    assert reasons("cuda") == ["there is no CUDA device here"]
    monkeypatch.setattr(support, "compute_capability", lambda device: 75)
    assert "SM75" in reasons("cuda")[0]
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    assert reasons("cuda", "bfloat16") == []


def test_it_is_registered() -> None:
    assert isinstance(select.create("triton"), TritonAttention)


def test_plan_comes_first(device: torch.device) -> None:
    case = to(make_case(layer_spec(), [(1, 4)]), device)
    with pytest.raises(RuntimeError, match="plan"):
        TritonAttention().run(case.inputs)
