"""The native state kernels against their references, and against themselves however sequences are cut into steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.state_steps import blocks_of, in_chunks, state_step

from headrace.kernels import state as ops
from headrace.kernels.native import NativeKernels, library
from headrace.kernels.state import StateMetadata
from headrace.kernels.state.reference import (
    causal_conv_ref,
    delta_rule_ref,
    gated_norm_ref,
    selective_scan_ref,
    state_space_ref,
)

T = 41
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [(3, 1, 9), (-1, 1, 0), (0, 20, 0), (-1, 4, 0), (2, 15, 64)]
"""(block, tokens, start): 41 tokens with padding rows among them."""


@pytest.fixture(autouse=True)
def chosen(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions under test use the kernels of the test's instruction set."""
    monkeypatch.setattr(library, "load", lambda: kernels)


def slices(*widths: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parts of a projection: not contiguous."""
    return list(torch.randn(T, sum(widths) + 3).to(dtype).split_with_sizes([*widths, 3], dim=1)[:-1])


def gated_conv_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cache: torch.Tensor, step: StateMetadata
) -> torch.Tensor:
    gate, out_gate, values = x.chunk(3, dim=1)
    return out_gate * causal_conv_ref(gate * values, weight, bias, None, cache, step)


Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor], list, list[torch.Tensor]]


def case(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
    """(operation, reference, inputs by token, weights before the state, states of two runs)."""
    torch.manual_seed(len(name))
    if name.startswith("conv"):
        channels, taps = (16, 3) if name == "conv-short" else (150, 4)
        weights: list = [torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype), "silu"]
        if name == "conv-gated":
            states = [blocks_of(5, taps - 1, channels, dtype=dtype) for _ in range(2)]
            return ops.gated_conv, gated_conv_ref, slices(3 * channels, dtype=dtype), weights[:2], states
        if name == "conv-short":
            weights = [weights[0], None, None]
        states = [blocks_of(5, taps - 1, channels, dtype=dtype) for _ in range(2)]
        return ops.causal_conv, causal_conv_ref, slices(channels, dtype=dtype), weights, states
    if name == "space":
        heads, groups, width, size = 4, 2, 8, 24
        inputs = slices(heads * width + 2 * groups * size, heads, dtype=dtype)
        weights = [torch.randn(heads) for _ in range(3)]
        states = [blocks_of(5, heads, width, size, dtype=state_dtype) for _ in range(2)]
        return ops.state_space, state_space_ref, inputs, weights, states
    if name == "scan":
        channels, size = 24, 10
        inputs = slices(channels, channels, size, size, dtype=dtype)
        weights = [-torch.rand(channels, size), *torch.randn(2, channels)]
        states = [blocks_of(5, channels, 1, size, dtype=state_dtype) for _ in range(2)]
        return ops.selective_scan, selective_scan_ref, inputs, weights, states
    key_heads, heads, dk, dv = 2, 6, 20, 12
    fades = heads * (dk if name == "delta-channels" else 1)
    inputs = slices(2 * key_heads * dk + heads * dv, fades, heads, dtype=dtype)
    states = [blocks_of(5, heads, dv, dk, dtype=state_dtype) for _ in range(2)]
    return ops.delta_rule, delta_rule_ref, inputs, [torch.randn(heads), torch.randn(fades)], states


NAMES = ["conv", "conv-short", "conv-gated", "delta", "delta-channels", "space", "scan"]


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_reference(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    operation, reference, inputs, weights, states = case(name, dtype, state_dtype)
    states[0].normal_()
    states[1].copy_(states[0])
    before, step = states[0].clone(), state_step(ROWS)
    out = operation(*inputs, *weights, states[0], step)
    expected = reference(*inputs, *weights, states[1], step)
    assert out.dtype == expected.dtype
    coarse = torch.bfloat16 in (out.dtype, states[0].dtype)
    close = {"atol": 3e-2, "rtol": 3e-2} if coarse else {"atol": 3e-5, "rtol": 1e-4}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(*states, **close)
    assert not out[1].any() and not out[22:26].any()
    assert torch.equal(states[0][[1, 4]], before[[1, 4]])


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bitwise_however_it_is_cut(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    operation, _, inputs, weights, (whole, cut) = case(name, dtype, state_dtype)

    def run(states: torch.Tensor) -> Callable[[torch.Tensor, StateMetadata], torch.Tensor]:
        return lambda at, step: operation(*(each[at] for each in inputs), *weights, states, step)

    expected = in_chunks(run(whole), T, (), 1)
    for block, chunks in enumerate([(1,) * 40, (37, 3), (5, 16, 1)]):
        assert torch.equal(in_chunks(run(cut), T, chunks, block), expected)
        assert torch.equal(cut[block], whole[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_company_changes_no_bits(name: str, dtype: torch.dtype) -> None:
    operation, _, inputs, weights, (states, alone) = case(name, dtype, torch.float32)
    states.normal_()
    alone.copy_(states)
    out, first = operation(*inputs, *weights, states, state_step(ROWS)), 0
    for row in ROWS:
        at = slice(first, first := first + row[1])
        one = operation(*(each[at] for each in inputs), *weights, alone, state_step([row]))
        assert torch.equal(one, out[at])
    assert torch.equal(states, alone)


@pytest.mark.parametrize("size", [100.0, 3e-4])
@pytest.mark.parametrize("name", ["delta", "delta-channels"])
def test_queries_and_keys_of_any_size(name: str, size: float) -> None:
    operation, reference, inputs, weights, states = case(name, torch.float32, torch.float32)
    inputs[0] = inputs[0].clone()
    inputs[0][:, :80] *= size
    step = state_step(ROWS)
    for state in states:
        state.zero_()
    out, expected = operation(*inputs, *weights, states[0], step), reference(*inputs, *weights, states[1], step)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(*states, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(dtype: torch.dtype, gate: ops.Gate, gate_first: bool) -> None:
    torch.manual_seed(1)
    x, z = 4 * torch.randn(T, 60), 4 * slices(60, dtype=dtype)[0]
    for channels in (20, 60):
        weight = torch.randn(channels).to(dtype)
        got = ops.gated_norm(x, z, weight, 1e-6, 20, gate, gate_first=gate_first)
        expected = gated_norm_ref(x, z, weight, 1e-6, 20, gate, gate_first=gate_first)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=2 * torch.finfo(dtype).eps + 2e-6)


@pytest.mark.parametrize("name", ["delta", "space"])
def test_rounded_states_do_not_drift(name: str) -> None:
    """Over 8,192 tokens the error of a state in bfloat16 stays what one rounding a token makes, and does not grow."""
    torch.manual_seed(5)
    length, heads, width = 8_192, 2, 16
    if name == "delta":
        operation, inputs = ops.delta_rule, [torch.randn(length, 3 * heads * width), *torch.randn(2, length, heads)]
        weights = [torch.randn(heads), torch.randn(heads)]
    else:
        operation = ops.state_space
        inputs, weights = [torch.randn(length, 3 * heads * width), torch.randn(length, heads)], [*torch.randn(3, heads)]
    step = state_step([(0, length, 0)])
    outputs = []
    for dtype in DTYPES:
        state = blocks_of(1, heads, width, width, dtype=dtype)
        state.zero_()
        outputs.append(operation(*inputs, *weights, state, step))
    exact, rounded = (out.view(8, -1) for out in outputs)
    errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert exact.isfinite().all() and 0 < errors.max() < 0.02
    assert errors[-1] < 2 * errors[0]
