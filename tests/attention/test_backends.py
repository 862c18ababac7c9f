"""Every backend against the oracle, and the oracle against a formula written another way."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import Case, layer_spec, make_case, with_ends

from headrace.attention import select
from headrace.attention.backend import VISIBLE_ENDS
from headrace.attention.compose import ByRowClass
from headrace.attention.torch_cpu import partition

HERE = [
    name
    for name, reasons in select.refusals(layer_spec(), "cpu", "float32").items()
    if not reasons and name not in ("triton", "invariant")
]
"""The backends that can run on this machine: the native one needs a compiler. Triton's interpreter takes tests of its own."""
OTHERS = [name for name in HERE if name != "reference"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def run(name: str, case: Case) -> torch.Tensor:
    backend = select.create(name)
    backend.plan(case.step)
    return backend.run(case.inputs)


def check(case: Case, names: list[str] = OTHERS) -> None:
    dtype = str(case.q.dtype).removeprefix("torch.")
    expected = run("reference", case)
    total = case.step.num_tokens
    assert expected.isfinite().all()
    for name in names:
        if select.refusals(case.cache.spec, "cpu", dtype)[name]:
            continue
        got = run(name, case)
        assert got.dtype == case.q.dtype
        torch.testing.assert_close(got[:total], expected[:total], atol=TOLERANCE[case.q.dtype], rtol=1e-3)


def test_the_oracle_is_the_formula() -> None:
    """Softmax over one dense row by einsum, with everything switched on, in another order of operations."""
    spec = layer_spec(num_heads=6, num_kv_heads=3, head_dim=10, v_head_dim=7, window=5, soft_cap=2.0, sinks=True, scale=0.7)
    case = make_case(spec, [(9, 9)], dtype=torch.float64, block_size=16)
    block = case.step.block_tables[0][0, 0]
    k = case.cache.keys[block][:9].repeat_interleave(2, dim=1)
    v = case.cache.values[block][:9].repeat_interleave(2, dim=1)
    logits = 2.0 * torch.tanh(0.7 * torch.einsum("qhd,khd->hqk", case.q, k) / 2.0)
    weights = logits.exp()
    for query in range(9):
        for key in range(9):
            if not query - 5 < key <= query:
                weights[:, query, key] = 0
    assert case.sinks is not None
    total = weights.sum(-1, keepdim=True) + case.sinks.double().exp()[:, None, None]
    expected = torch.einsum("hqk,khd->qhd", weights / total, v)
    torch.testing.assert_close(run("reference", case), expected.flatten(1), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 9])
def test_group_sizes(group_size: int, dtype: torch.dtype) -> None:
    spec = layer_spec(num_heads=2 * group_size, num_kv_heads=2)
    check(make_case(spec, [(1, 9), (1, 40), (7, 7), (5, 23)], dtype=dtype))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 80), (13, 13), (24, 8), (8, 24), (17, 5), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_widths(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    spec = layer_spec(num_heads=6, num_kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim, scale=head_dim**-0.5)
    check(make_case(spec, [(1, 33), (1, 5), (1, 1), (12, 12), (3, 19)], dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 7, 16, 100])
def test_windows(window: int) -> None:
    spec = layer_spec(window=window)
    check(make_case(spec, [(1, 1), (1, 30), (1, 8), (20, 20), (3, 40), (2, 2), (17, 33)], dtype=torch.float64))


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunks(chunk: int) -> None:
    spec = layer_spec(window=chunk, chunked=True)
    check(make_case(spec, [(1, 1), (1, 30), (1, 16), (20, 20), (3, 40), (2, 2), (17, 33)]))


def test_long_rows_are_cut_into_pieces() -> None:
    """More queries than one mask holds, with a prefix and with a window."""
    for changes in ({}, {"window": 300}, {"window": 20}, {"window": 250, "chunked": True}, {"v_head_dim": 8}):
        spec = layer_spec(num_heads=3, num_kv_heads=1, **changes)
        check(make_case(spec, [(600, 600), (1, 900), (530, 700)], block_size=16))


def test_lengths_far_apart() -> None:
    """Many short rows beside a few long ones: several parts, rows out of order."""
    lengths = [3, 700, 5, 1, 64, 1000, 2, 9, 650, 30, 31, 33]
    check(make_case(layer_spec(), [(1, length) for length in lengths], dtype=torch.float64))


def test_rows_in_any_order() -> None:
    check(make_case(layer_spec(), [(4, 9), (1, 3), (2, 2), (1, 50), (1, 7), (8, 30), (1, 1)], dtype=torch.float64))


@pytest.mark.parametrize("name", HERE)
def test_padding_changes_nothing(name: str) -> None:
    """Wide tables, padding rows (length 0) and tokens behind the last row leave the others' results as they were."""
    rows = [(1, 9), (1, 20), (6, 11)]
    plain = make_case(layer_spec(), rows)
    padded = make_case(layer_spec(), rows, wide=7)
    padded.q, padded.cache = plain.q, plain.cache
    padded.step.block_tables[0][:, : plain.step.block_tables[0].shape[1]] = plain.step.block_tables[0]
    torch.testing.assert_close(run(name, padded), run(name, plain))

    padded = make_case(layer_spec(), [*rows, (1, 0), (1, 0)], extra_tokens=3)
    padded.q[:8] = plain.q
    padded.cache = plain.cache
    padded.step.block_tables[0][:3, : plain.step.block_tables[0].shape[1]] = plain.step.block_tables[0]
    out = run(name, padded)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:8], run(name, plain), atol=1e-6, rtol=1e-5)


def test_plan_comes_first() -> None:
    case = make_case(layer_spec(), [(1, 4)])
    for name in HERE:
        with pytest.raises(RuntimeError, match="plan"):
            select.create(name).run(case.inputs)


SEEING = [name for name in OTHERS if VISIBLE_ENDS in select.create(name).modes]
BIDIRECTIONAL = [
    ([(12, 12)], [(0, 3, 9)]),
    ([(40, 40)], [(0, 0, 5), (0, 5, 21), (0, 30, 40)]),
    ([(1, 9), (1, 20), (16, 30), (7, 7), (1, 5)], [(2, 16, 27), (3, 0, 7)]),
    ([(10, 30), (5, 5)], [(0, 2, 17)]),
]
"""Rows, and spans: several side by side; beside decode rows; all of it in the cache before the step."""


@pytest.mark.parametrize(
    "changes", [{}, {"window": 4}, {"window": 1}, {"soft_cap": 2.0, "sinks": True, "v_head_dim": 9}], ids=str
)
@pytest.mark.parametrize(("rows", "spans"), BIDIRECTIONAL)
def test_visible_ends(rows: list[tuple[int, int]], spans: list[tuple[int, int, int]], changes: dict[str, object]) -> None:
    case = make_case(layer_spec(**changes), rows, dtype=torch.float64)
    check(with_ends(case, spans), SEEING)
    # Where no token sees behind itself, nothing changes.
    torch.testing.assert_close(run("reference", with_ends(case, [])), run("reference", case))


def test_the_oracle_sees_spans_whole() -> None:
    """Softmax by hand: within a window, or up to the end of the span that the query is in."""
    spec = layer_spec(num_heads=1, num_kv_heads=1, window=3)
    case = with_ends(make_case(spec, [(10, 10)], dtype=torch.float64, block_size=16), [(0, 2, 7)])
    block = case.step.block_tables[0][0, 0]
    keys, values = case.cache.keys[block, :10, 0], case.cache.values[block, :10, 0]
    for query in range(10):
        seen = [key for key in range(10) if key > query - 3 and (key <= query or (2 <= query < 7 and key < 7))]
        weights = (spec.scale * keys[seen] @ case.q[query, 0]).softmax(0)
        torch.testing.assert_close(run("reference", case)[query], weights @ values[seen])


@pytest.mark.parametrize("name", ["reference", *SEEING])
@pytest.mark.parametrize("window", [None, 6])
def test_chunks_of_a_bidirectional_prompt(name: str, window: int | None) -> None:
    """Cut outside of its spans, and decoded after them, a row comes out as in one piece."""
    spans = [(0, 3, 11), (0, 11, 14), (0, 20, 27)]
    whole = make_case(layer_spec(window=window), [(32, 32)], dtype=torch.float64)
    whole.cache.rows.nan_to_num_(0.0)
    expected = run("reference", with_ends(whole, spans))
    cuts = [0, 2, 14, 17, 28, 30, 31, 32]
    for first, end in itertools.pairwise(cuts):
        starts = np.array([0, end - first], dtype=np.int32)
        step = dataclasses.replace(
            whole.step,
            num_decode_rows=int(end - first == 1),
            query_start=torch.from_numpy(starts),
            query_start_host=starts,
            seq_lens=torch.tensor([end], dtype=torch.int32),
            seq_lens_host=np.array([end], dtype=np.int32),
        )
        chunk = with_ends(dataclasses.replace(whole, q=whole.q[first:end], step=step), spans)
        torch.testing.assert_close(run(name, chunk), expected[first:end], atol=1e-12, rtol=1e-9)


def test_a_step_with_ends_is_refused_by_those_that_do_not_know_them() -> None:
    case = with_ends(make_case(layer_spec(), [(4, 4)]), [(0, 0, 4)])
    for name in set(OTHERS) - set(SEEING):
        with pytest.raises(ValueError, match=f"{name} has no mode visible_ends"):
            run(name, case)


@pytest.mark.parametrize("changes", [{}, {"window": 5, "sinks": True}, {"v_head_dim": 9}], ids=str)
@pytest.mark.parametrize(("decode", "prefill"), list(itertools.product(HERE, repeat=2)))
def test_row_classes_side_by_side(decode: str, prefill: str, changes: dict[str, object]) -> None:
    """Each backend fills its rows and no others; tokens of no row are zeros."""
    case = make_case(layer_spec(**changes), [(1, 9), (1, 20), (6, 11), (1, 1), (9, 9)], extra_tokens=3)
    case.step = dataclasses.replace(case.step, num_decode_rows=2)
    if refused := [why for name in (decode, prefill) for why in select.refusals(case.cache.spec, "cpu", "float32")[name]]:
        pytest.skip(refused[0])
    cases = [case]
    if {decode, prefill} <= {"reference", *SEEING}:
        cases.append(with_ends(case, [(2, 6, 10), (4, 0, 9)]))
    both = ByRowClass("both", select.create(decode), select.create(prefill))
    for each in cases:
        both.plan(each.step)
        out = both.run(each.inputs)
        torch.testing.assert_close(out[:18], run("reference", each)[:18], atol=2e-5, rtol=1e-3)
        assert out[18:].eq(0).all()
    for rows in ([(1, 9), (1, 20)], [(6, 11), (9, 9)], []):
        alone = make_case(layer_spec(**changes), rows)
        both.plan(alone.step)
        torch.testing.assert_close(both.run(alone.inputs), run("reference", alone), atol=2e-5, rtol=1e-3)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Case, list[tuple[int, int, int]]]:
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 20))
    spec = layer_spec(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 9])),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, 3, 9, 16])),
        scale=draw(st.sampled_from([0.1, 0.35, 1.0])),
        window=draw(st.sampled_from([None, None, 1, 3, 8, 30])),
        soft_cap=draw(st.sampled_from([None, None, 1.5, 20.0])),
        sinks=draw(st.booleans()),
    )
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.sampled_from([1, 1, 2, 5, 13, 40]))
        rows.append((count, count + draw(st.sampled_from([0, 0, 1, 3, 17, 64]))))
    spans = []
    for row, (_, length) in enumerate(rows):
        first = draw(st.integers(0, length - 1))
        spans.append((row, first, draw(st.integers(first + 1, length))))
    case = make_case(
        spec,
        rows,
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        seed=draw(st.integers(0, 1000)),
        wide=draw(st.integers(0, 2)),
    )
    return case, spans


@settings(max_examples=80, deadline=None, derandomize=True)
@given(problems())
def test_any_problem(problem: tuple[Case, list[tuple[int, int, int]]]) -> None:
    case, spans = problem
    check(case)
    check(with_ends(case, spans), SEEING)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 4000), st.integers(0, 600))
def test_partition(sizes: list[int], budget: int, waste: int) -> None:
    groups = partition(sizes, budget, waste)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        widest = max(sizes[index] for index in group)
        assert len(group) == 1 or len(group) * widest <= budget
        assert sum(widest - sizes[index] for index in group) <= waste
        assert group == sorted(group)


def test_equal_lengths_make_one_part_in_order() -> None:
    assert partition([5] * 32, 1000, 0) == [list(range(32))]
