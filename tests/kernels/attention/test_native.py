"""The native attention kernel for every instruction set, against the oracle; and what holds of it bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import Case, layer_spec, make_case

from headrace.attention import native as backend
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.kernels.native import NativeKernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def chosen(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend uses the kernels of the test's instruction set."""
    monkeypatch.setattr(backend.native, "load", lambda: kernels)


def run(case: Case) -> torch.Tensor:
    attention = NativeAttention()
    attention.plan(case.step)
    return attention.run(case.inputs)


def check(case: Case) -> None:
    oracle = ReferenceAttention()
    oracle.plan(case.step)
    expected = oracle.run(case.inputs)
    torch.testing.assert_close(run(case), expected, atol=TOLERANCE[case.q.dtype], rtol=1e-3)


ROWS = [(1, 1), (1, 9), (1, 700), (7, 7), (70, 200), (1, 64), (3, 130)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (10, 2), (20, 1)], ids=str)
def test_groups(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Group sizes below and above the one from which query heads are the lanes."""
    check(make_case(layer_spec(num_heads=heads[0], num_kv_heads=heads[1]), ROWS, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (80, 80), (13, 5), (8, 24), (96, 200)], ids=str)
def test_widths(widths: tuple[int, int], dtype: torch.dtype) -> None:
    spec = layer_spec(head_dim=widths[0], v_head_dim=widths[1], scale=widths[0] ** -0.5)
    for seed in (0, 1):
        check(make_case(spec, ROWS, dtype=dtype, block_size=16, seed=seed))


@pytest.mark.parametrize(
    "changes", [{"window": 1}, {"window": 50}, {"window": 300}, {"soft_cap": 1.5}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("group_size", [3, 8])
def test_masks_caps_and_sinks(changes: dict[str, object], group_size: int) -> None:
    spec = layer_spec(num_heads=2 * group_size, **changes)
    check(make_case(spec, ROWS))
    check(make_case(layer_spec(num_heads=2 * group_size, window=40, soft_cap=2.0, sinks=True), ROWS, block_size=8))


@pytest.mark.parametrize("group_size", [3, 8])
def test_long_contexts_are_split_among_threads(group_size: int) -> None:
    """Merging the parts of a row's keys gives what one walk gives; more threads than this machine has cores."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            for changes in ({}, {"sinks": True}, {"window": 900}):
                spec = layer_spec(num_heads=group_size, num_kv_heads=1, **changes)
                check(make_case(spec, [(1, 3000)], block_size=16))
                check(make_case(spec, [(1, 1500), (1, 5), (40, 600), (1, 900)], block_size=16))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    """Bit for bit: a query of a prompt among other rows, and a prompt in other chunks."""
    spec = layer_spec(head_dim=64, v_head_dim=64)
    whole = make_case(spec, [(90, 90), (1, 30), (33, 70)], dtype=dtype)
    out = run(whole)
    table = whole.step.block_tables[0]
    for begin, end in ((0, 90), (0, 40), (40, 90), (3, 64)):
        part = make_case(spec, [(end - begin, end)], dtype=dtype)
        part.q, part.cache = whole.q[begin:end], whole.cache
        part.step.block_tables[0][0] = table[0, : part.step.block_tables[0].shape[1]]
        assert torch.equal(run(part), out[begin:end])


def test_large_logits() -> None:
    """Differences beyond what exp can represent: the softmax is one key's."""
    case = make_case(layer_spec(scale=100.0), [(1, 40), (20, 90)])
    assert run(case).isfinite().all()
    check(case)


def test_refusals() -> None:
    spec = layer_spec()
    assert NativeAttention.supports(spec, "cpu", "float32") == []
    assert any("float16" in reason for reason in NativeAttention.supports(spec, "cpu", "float16"))
    assert any("cuda" in reason for reason in NativeAttention.supports(spec, "cuda", "float32"))
    assert any("sparse" in reason for reason in NativeAttention.supports(spec, "cpu", "float32", None, frozenset({"sparse"})))


def test_refusal_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.native, "load", lambda: None)
    assert any("compiled" in reason for reason in NativeAttention.supports(layer_spec(), "cpu", "float32"))
    with pytest.raises(RuntimeError, match="not available"):
        NativeAttention()
