"""Every backend against the oracle, and the oracle against a formula written another way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention import select
from headrace.attention.torch_cpu import partition

from .cases import Case, layer_spec, make_case

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
    return backend.run(case.q, case.cache, case.sinks)


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


def test_long_rows_are_cut_into_pieces() -> None:
    """More queries than one mask holds, with a prefix and with a window."""
    for changes in ({}, {"window": 300}, {"window": 20}, {"v_head_dim": 8}):
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
    """Wide tables, rows of nobody (length 0) and tokens behind the last row leave the others' results as they were."""
    rows = [(1, 9), (1, 20), (6, 11)]
    plain = make_case(layer_spec(), rows)
    padded = make_case(layer_spec(), rows, wide=7)
    padded.q, padded.cache = plain.q, plain.cache
    padded.step.block_tables[0][:, : plain.step.block_tables[0].shape[1]] = plain.step.block_tables[0]
    torch.testing.assert_close(run(name, padded), run(name, plain))

    nobody = make_case(layer_spec(), [*rows, (1, 0), (1, 0)], extra_tokens=3)
    nobody.q[:8] = plain.q
    nobody.cache = plain.cache
    nobody.step.block_tables[0][:3, : plain.step.block_tables[0].shape[1]] = plain.step.block_tables[0]
    out = run(name, nobody)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:8], run(name, plain), atol=1e-6, rtol=1e-5)


def test_plan_comes_first() -> None:
    case = make_case(layer_spec(), [(1, 4)])
    for name in HERE:
        with pytest.raises(RuntimeError, match="plan"):
            select.create(name).run(case.q, case.cache)


@st.composite
def problems(draw: st.DrawFn) -> Case:
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
    return make_case(
        spec,
        rows,
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        seed=draw(st.integers(0, 1000)),
        wide=draw(st.integers(0, 2)),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(problems())
def test_any_problem(case: Case) -> None:
    check(case)


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
