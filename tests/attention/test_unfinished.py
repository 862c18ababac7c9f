"""Decode rows whose q, k and v attention finishes itself, against the kernel that does it for all steps."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.attention_cases import layer_spec, make_case

from headrace.attention.backend import AttentionInputs
from headrace.attention.compose import ByRowClass
from headrace.attention.context import ForwardContext
from headrace.attention.layer import Attention
from headrace.attention.triton import InvariantAttention, TritonAttention
from headrace.cache.layer import LayerCache
from headrace.kernels import gpu, support
from headrace.kernels.attention import cuda_decode
from headrace.kernels.attention.unfinished import Unfinished
from headrace.layers.norm import RMSNorm
from headrace.runner.inputs import last_tokens

pytestmark = pytest.mark.skipif(support.refusals("cpu") == ["Triton is not installed"], reason="Triton is not installed")


class Result(NamedTuple):
    out: torch.Tensor
    cache: LayerCache
    finished: int
    """Calls that the backend finished."""


class Counting(TritonAttention):
    may = True
    finished = 0

    def finishes(self, cache: LayerCache) -> bool:
        return self.may and super().finishes(cache)

    def run(self, inputs):
        self.finished += inputs.unfinished is not None
        return super().run(inputs)


def attend(
    rows: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, may: bool, *, normed: bool = True, longest: int = 0,
    rotary: int, wanted: bool = False, **changes: object,
) -> Result:  # fmt: skip
    spec = layer_spec(rotary_dim=rotary, **changes)
    case = make_case(spec, rows, dtype=dtype, block_size=8, extra_tokens=1)
    torch.manual_seed(1)
    size, width = len(case.q), spec.q_size + spec.k_size + spec.num_kv_heads * spec.v_head_dim
    qkv, angles = torch.randn(size, width).to(dtype), torch.randn(size, max(rotary, 1))
    table, slots = case.step.block_tables[0], torch.full((size,), -1)
    for row, (count, length) in enumerate(rows):
        for position in range(length - count, length):
            token = int(case.step.query_start_host[row]) + position - length + count
            slots[token] = table[row, position // 8] * 8 + position % 8
            case.cache.rows.view(-1, *case.cache.rows.shape[2:])[slots[token]] = torch.nan  # Nothing is there yet.
    step = dataclasses.replace(
        case.step, slot_mapping=(slots.to(device),), longest=longest,
        **{name: getattr(case.step, name).to(device) for name in ("query_start", "seq_lens")},
        block_tables=(table.to(device),),
    )  # fmt: skip
    cache = dataclasses.replace(case.cache, rows=case.cache.rows.to(device))
    backend = Counting()
    backend.may = may
    whole = ByRowClass("both", backend, TritonAttention())
    last = last_tokens(step, np.ones(len(rows), np.int64)) if wanted else None
    whole.plan(step if last is None else last.step)
    layer = Attention(spec, device)
    if layer.sinks is not None:
        layer.sinks.copy_(torch.randn(spec.num_heads))
    made = [RMSNorm(spec.head_dim, 1e-5, dtype=dtype, device=device) for _ in range(2)]
    for norm in made:
        norm.weight.data.copy_(torch.rand(spec.head_dim) + 0.5)
    q_norm, k_norm = made if normed else (None, None)
    ctx = ForwardContext(step, [cache], [whole], wanted=last)
    with pytest.MonkeyPatch.context() as patch:
        if may:  # Of a CPU's tensors only attention's kernel runs, by the interpreter.
            patch.setattr(gpu, "takes", lambda x: True)
        out = layer.forward_qkv(qkv.to(device), ctx, angles.to(device) if rotary else None, q_norm, k_norm)
    return Result(out, cache, backend.finished)


@pytest.mark.parametrize(
    ("rotary", "changes"),
    [
        (16, {}),
        (8, {"num_heads": 10, "head_dim": 32, "sinks": True}),
        (16, {"window": 6, "num_kv_heads": 1, "num_heads": 9}),
        (0, {"v_head_dim": 8, "window": 16, "chunked": True}),
        (64, {"head_dim": 64, "v_head_dim": 32, "soft_cap": 2.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("longest", [0, 1024], ids=["whole", "in splits"])
def test_they_are_as_in_other_steps(longest: int, rotary: int, changes: dict[str, object], device: torch.device) -> None:
    rows = [(1, 9), (1, 40), (1, 1), (1, 8), (1, 300)]
    case = {"normed": "soft_cap" not in changes, "longest": longest, "rotary": rotary, **changes}
    got, expected = (attend(rows, torch.float32, device, may, **case) for may in (True, False))
    assert (got.finished, expected.finished) == (1, 0)
    torch.testing.assert_close(got.out, expected.out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(got.cache.rows, expected.cache.rows, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_16_bits_are_rounded_as_often(device: torch.device) -> None:
    got, expected = (attend([(1, 33), (1, 7)], torch.float16, device, may, rotary=16) for may in (True, False))
    assert got.finished == 1
    torch.testing.assert_close(got.out, expected.out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got.cache.rows, expected.cache.rows, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_tokens_that_are_not_wanted_are_written(device: torch.device) -> None:
    """The wanted tokens of prompts attend as decode rows do, but the cache needs the keys of all."""
    got, expected = (attend([(5, 9), (3, 3)], torch.float32, device, may, rotary=16, wanted=True) for may in (True, False))
    assert got.finished == 0
    torch.testing.assert_close(got.out, expected.out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(got.cache.rows, expected.cache.rows, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_what_is_finished_before(device: torch.device) -> None:
    """Rows beside prompts, rows whose bits must not depend on the step, and heads of widths that are cut in two."""
    case, odd = (make_case(layer_spec(**changes), [(1, 9)]) for changes in ({}, {"head_dim": 40}))
    backends = TritonAttention(), InvariantAttention()
    for backend in backends:
        backend.plan(case.step)
    assert [backend.finishes(case.cache) for backend in backends] == [True, False]
    assert not backends[0].finishes(odd.cache)
    both = ByRowClass("both", TritonAttention(), TritonAttention())
    for rows, expected in (([(1, 9), (5, 7)], False), ([(1, 9)], True)):
        both.plan(make_case(layer_spec(), rows).step)
        assert both.finishes(case.cache) == expected


def test_what_the_kernel_in_cuda_may_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read before the previous kernel is complete in all layers but a step's first."""
    given: list[tuple[bool, tuple[int, ...], tuple[int, ...]]] = []

    def decode(unfinished: Unfinished, rows: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
               *, scale: float, tiling: object, early: bool) -> None:  # fmt: skip
        given.append((early, tuple(unfinished.qkv.shape), tuple(out.shape)))

    monkeypatch.setattr(cuda_decode, "takes", lambda *arguments: True)
    monkeypatch.setattr(cuda_decode, "decode_attention", decode)
    case = make_case(layer_spec(rotary_dim=16), [(1, 9), (1, 40)], dtype=torch.float32, block_size=8, extra_tokens=1)
    spec = case.cache.spec
    qkv = torch.zeros(3, spec.q_size + spec.k_size + spec.num_kv_heads * spec.v_head_dim)
    unfinished = Unfinished(qkv, torch.zeros(3, dtype=torch.int64), torch.zeros(3, 16), 16, None, None, 0.0, False)
    backend = TritonAttention()
    for _ in range(2):
        backend.plan(case.step)
        for _ in range(2):
            backend.run(AttentionInputs(case.q, case.cache, unfinished=unfinished))
    assert [early for early, *_ in given] == [False, True] * 2
    assert given[0][1:] == ((2, qkv.shape[1]), (2, spec.num_heads, spec.v_head_dim))
