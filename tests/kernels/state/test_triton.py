"""The Triton state kernels against their references, and against themselves however sequences are cut into steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.state_steps import blocks_of, in_chunks, state_step

from headrace.kernels.state import StateMetadata, triton_kept
from headrace.kernels.state import triton as kernels
from headrace.kernels.state.metadata import TILE, Pending
from headrace.kernels.state.reference import (
    causal_conv_ref,
    delta_rule_ref,
    gated_norm_ref,
    selective_scan_ref,
    state_space_ref,
)
from headrace.kernels.state.triton_scan import selective_scan

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state has no more than two programs."""
    for module in (kernels, triton_kept):
        monkeypatch.setattr(module, "_VALUES", 32)


def slices(tokens: int, *widths: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Parts of a projection: not contiguous."""
    whole = torch.randn(tokens, sum(widths) + 3).to(dtype).to(device)
    return list(whole.split_with_sizes([*widths, 3], dim=1)[:-1])


class Case:
    """An operation's kernel and reference, and random inputs."""

    def __init__(self, name: str, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(len(name))
        self.device, self.state_dtype = device, state_dtype
        self.weights: list = []
        """Arguments between the inputs and the states."""
        self.last: list = []
        """Arguments behind the step."""
        self.long = 7 if name in ("delta-channels", "scan") else LONG
        """Tokens of the longest row: these two absorb no prompt in tiles."""
        tokens = self.long + 11
        if name.startswith("conv"):
            channels, taps = (150, 4) if name == "conv" else (16, 3)
            self.kernel, self.reference = kernels.causal_conv, causal_conv_ref
            self.inputs = slices(tokens, channels, dtype=dtype, device=device)
            weight, bias = torch.randn(channels, taps).to(dtype).to(device), torch.randn(channels).to(dtype).to(device)
            self.weights = [weight, bias, "silu"] if name == "conv" else [weight, None, None]
            self.shape, self.state_dtype = (taps - 1, channels), dtype
        elif name.startswith("space"):
            heads, groups, width, size = (4, 2, 8, 24) if name == "space" else (2, 2, 20, 20)
            self.kernel, self.reference = kernels.state_space, state_space_ref
            self.inputs = slices(tokens, heads * width + 2 * groups * size, heads, dtype=dtype, device=device)
            self.weights, self.last = [*torch.randn(3, heads).to(device)], [(0.2, 1.0)]
            if name == "space-fixed":
                self.inputs[1], self.last = self.inputs[1][:1].expand(tokens, -1), [(1.0, 1.0)]
            self.shape = (heads, width, size)
        elif name == "scan":
            channels, size = 40, 12
            self.kernel, self.reference = selective_scan, selective_scan_ref
            self.inputs = slices(tokens, channels, channels, size, size, dtype=dtype, device=device)
            self.weights = [-torch.rand(channels, size).to(device), *torch.randn(2, channels).to(device)]
            self.shape = (channels, 1, size)
        else:
            key_heads, heads, dk, dv = 1, 2, 12, 36
            fades = heads * (dk if name == "delta-channels" else 1)
            self.kernel, self.reference = kernels.delta_rule, delta_rule_ref
            self.inputs = slices(tokens, 2 * key_heads * dk + heads * dv, fades, heads, dtype=dtype, device=device)
            self.weights, self.last = [torch.randn(heads).to(device), torch.randn(fades).to(device)], [2]
            self.shape = (heads, dv, dk)

    def states(self) -> torch.Tensor:
        return blocks_of(5, *self.shape, dtype=self.state_dtype, device=str(self.device))

    def run(
        self, operation: Callable[..., torch.Tensor], states: torch.Tensor, step: StateMetadata, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        inputs = self.inputs if at is None else [each[at.to(self.device)] for each in self.inputs]
        return operation(*inputs, *self.weights, states, step, *self.last)


def double(case: Case, step: StateMetadata, states: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
    """The reference in float64, which replaces the states."""
    wide, at = states.double(), torch.arange(len(case.inputs[0])) if at is None else at
    inputs, weights = (
        [each.double() if torch.is_tensor(each) else each for each in group]
        for group in ([each[at.to(case.device)] for each in case.inputs], case.weights)
    )
    out = case.reference(*inputs, *weights, wide, step, *case.last)
    states.copy_(wide)
    return out


NAMES = ["conv", "conv-short", "delta", "delta-channels", "space", "space-fixed", "scan"]
LONG = TILE + 6
"""Tokens of a prompt of two tiles."""
SIMILAR = ("conv-short", "delta-channels", "space-fixed")
"""They run the code of others. Time steps of the last are those of all tokens, and 1."""


@pytest.mark.parametrize(
    "dtype, state_dtype",
    [(DTYPES[0], DTYPES[0]), *(pytest.param(DTYPES[1], dtype, marks=pytest.mark.slow) for dtype in DTYPES)],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_reference(name: str, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device) -> None:
    """Prompts of a part of a tile and of more than one, with padding rows between."""
    case = Case(name, dtype, state_dtype, device)
    step = state_step([(3, 1, 9), (-1, 1, 0), (0, case.long, 0), (-1, 4, 0), (2, 5, 64)], str(device))
    states = [case.states() for _ in range(2)]
    states[0].normal_()
    states[1].copy_(states[0])
    before = states[0].clone()
    got, expected = case.run(case.kernel, states[0], step), double(case, step, states[1])
    coarse = torch.bfloat16 in (dtype, case.state_dtype)
    # The interpreter cuts bfloat16 off.
    close = {"atol": 6e-2, "rtol": 5e-2} if coarse else {"atol": 3e-5, "rtol": 1e-4}
    torch.testing.assert_close(got.double(), expected, **close)
    torch.testing.assert_close(*states, **close)
    assert not got[1].any() and not got[case.long + 2 : case.long + 6].any()
    assert torch.equal(states[0][[1, 4]], before[[1, 4]])


@pytest.mark.parametrize("name", ["delta", "space"])
def test_any_decay_in_a_tile(name: str, device: torch.device) -> None:
    """Tokens that forget everything beside others that forget nothing: no factor of a tile overflows, none becomes 0 * inf."""
    case = Case(name, torch.float32, torch.float32, device)
    heads = case.inputs[1].shape[1]
    case.weights = [torch.zeros(heads, device=device) for _ in case.weights]
    case.last = [(0.0, float("inf"))] if name == "space" else case.last
    rates = torch.tensor([1e-9, 1e-3, 8.0, 50.0], dtype=torch.float64)
    drawn = rates[torch.randint(4, case.inputs[1].shape)]
    drawn[:TILE] = 8.0
    # softplus of it is the rate.
    case.inputs[1] = torch.where(drawn > 20, drawn, drawn.expm1().log()).float().to(device)
    step = state_step([(1, case.long, 0), (2, 11, 64)], str(device))
    states = [case.states() for _ in range(2)]
    states[0].normal_()
    states[1].copy_(states[0])
    got, expected = case.run(case.kernel, states[0], step), double(case, step, states[1])
    for ours, wanted in ((got.double(), expected), states):
        torch.testing.assert_close(ours, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("size", [100.0, 3e-4])
@pytest.mark.parametrize("name", ["delta", "delta-channels"])
def test_queries_and_keys_of_any_size(name: str, size: float, device: torch.device) -> None:
    case = Case(name, torch.float32, torch.float32, device)
    case.inputs[0] = case.inputs[0].clone()
    case.inputs[0][:, :24] *= size
    rows = [(3, 1, 9), (0, case.long, 0)]
    states, step, at = [case.states() for _ in range(2)], state_step(rows, str(device)), torch.arange(case.long + 1)
    for state in states:
        state.zero_()
    got, expected = case.run(case.kernel, states[0], step, at), double(case, step, states[1], at)
    torch.testing.assert_close(got.double(), expected, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(*states, atol=3e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "delta", "space"])
def test_prompts_of_all_lengths(name: str, device: torch.device) -> None:
    """One after the other in one step, from any multiple of a tile on: what fills up a last tile changes no state."""
    case = Case(name, torch.float32, torch.float32, device)
    for length in range(1, 2 * TILE + 3, 9):
        rows = [(0, 1, 130), (1, length, 0), (2, 64, 64 * length), (3, min(length + 1, 130), 640)]
        total = sum(count for _, count, _ in rows)
        at = torch.arange(total) % len(case.inputs[0])
        step = state_step(rows, str(device))
        states = [case.states() for _ in range(2)]
        states[0].normal_()
        states[1].copy_(states[0])
        got, expected = case.run(case.kernel, states[0], step, at), double(case, step, states[1], at)
        torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(*states, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in NAMES])
def test_company_changes_no_bits(name: str, device: torch.device) -> None:
    """A sequence's outputs and state are bitwise those that it has alone: decode rows, and prompts in tiles."""
    case = Case(name, torch.float32, torch.float32, device)
    rows, first = [(3, 1, 9), (-1, 1, 0), (4, 1, 70), (0, case.long, 0), (2, 5, 64)], 0
    together, alone = case.states().normal_(), case.states()
    alone.copy_(together)
    out = case.run(case.kernel, together, state_step(rows, str(device)), torch.arange(case.long + 8))
    for row in rows:
        at = torch.arange(first, first := first + row[1])
        assert torch.equal(case.run(case.kernel, alone, state_step([row], str(device)), at), out[at])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", ["conv", "delta", "space"])
def test_bitwise_where_chunks_end_at_tiles(name: str, device: torch.device) -> None:
    """The same prompt in one chunk, and cut behind its first tile in company."""
    case = Case(name, torch.float32, torch.float32, device)
    whole, cut = case.states(), case.states()
    expected = case.run(case.kernel, whole, state_step([(1, LONG, 0)], str(device)), torch.arange(LONG))
    first = case.run(case.kernel, cut, state_step([(4, 1, 3), (2, TILE, 0)], str(device)), torch.arange(-1, TILE))
    rest = [(4, 1, 4), (-1, 3, 0), (2, LONG - TILE, TILE)]
    at = torch.cat([torch.arange(4), torch.arange(TILE, LONG)])
    second = case.run(case.kernel, cut, state_step(rest, str(device)), at)
    assert torch.equal(torch.cat([first[1:], second[4:]]), expected)
    assert torch.equal(cut[2], whole[1])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in NAMES])
def test_bitwise_however_it_is_cut(name: str, device: torch.device) -> None:
    case = Case(name, torch.float32, torch.float32, device)
    whole, cut = case.states(), case.states()

    def run(states: torch.Tensor) -> Callable[[torch.Tensor, StateMetadata], torch.Tensor]:
        return lambda at, step: case.run(case.kernel, states, on(step), at)

    def on(step: StateMetadata) -> StateMetadata:
        return state_step([(row.block, row.tokens, row.start) for row in step.live_rows()], str(device), by_token=True)

    tokens = 9
    expected = in_chunks(run(whole), tokens, (), 1)
    for block, chunks in enumerate([(1,) * 5, (6, 2)]):
        assert torch.equal(in_chunks(run(cut), tokens, chunks, block), expected)
        assert torch.equal(cut[block], whole[1])


@pytest.mark.parametrize(("values", "turns", "most"), [(8, 1, 3), (4, 4, 7), pytest.param(8, 2, 7, marks=pytest.mark.slow)])
def test_states_are_written_in_some_steps_alone(
    values: int, turns: int, most: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A prompt, decode rows beside a padding row, a row of several tokens, and decode rows again. ``values`` and ``turns``:
    which of a head's rows are processed together, and one after the other. ``most``: tokens that a state may lack."""
    monkeypatch.setattr("headrace.kernels.state.triton_kept._VALUES", values)
    monkeypatch.setattr("headrace.kernels.state.triton_kept._turns", lambda *given, **rest: turns)
    case = Case("delta", torch.float32, torch.float32, device)
    heads, dv, dk = case.shape
    width = dk + heads * dv + heads
    kept = Pending(blocks_of(5, most, width, device=str(device)), torch.zeros(5, heads, dv, dtype=torch.int32, device=device))
    # Blocks begin with what others left, maybe no numbers.
    kept.tokens[2].fill_(torch.nan)
    now, later = case.states(), case.states()
    first, lacking = 0, []
    for count in (5, *[1] * 6, 3, *[1] * 5):
        rows = [(-1, 1, 0), (2, count, first)] if count == 1 else [(2, count, first)]
        step = state_step(rows, str(device))
        at = torch.arange(first + 1 - len(rows), first + count)
        expected = double(case, step, now, at)
        got = case.run(lambda *given: case.kernel(*given, kept), later, step, at)
        torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=1e-5)
        first += count
        lacking.append(first - int(kept.until[2, 0, 0]))
        if not lacking[-1]:
            torch.testing.assert_close(later[2], now[2], atol=3e-6, rtol=1e-5)
    assert lacking == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert (kept.until[2] == first - 3).all()
    assert not kept.until[[0, 1, 3, 4]].any() and not kept.tokens[[0, 1, 3, 4]].any() and not later[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_decode_rows_of_one_program(rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Convolutions of decode rows are the reference's, however many of them a program has, padding rows among them."""
    monkeypatch.setattr(kernels, "_FEW_TILE", (64, rows))
    for name in ("conv", "conv-short"):
        case = Case(name, torch.bfloat16, torch.float32, device)
        step = state_step([(2, 1, 7), (-1, 1, 0), (4, 1, 0), (0, 1, 5), (3, 1, 2)], str(device))
        kept, expected, at = case.states().normal_(), case.states(), torch.arange(5)
        expected.copy_(kept)
        got = case.run(case.kernel, kept, step, at)
        torch.testing.assert_close(got, case.run(case.reference, expected, step, at))
        assert torch.equal(kept, expected)


def test_padding_rows_read_nothing(device: torch.device) -> None:
    """Rows that fill a captured size have inputs that are not numbers, and no block."""
    for name in NAMES:
        case = Case(name, torch.float32, torch.float32, device)
        states, at = case.states(), torch.arange(5)
        for each in case.inputs:
            if each.stride(0):  # else one row is that of all tokens
                each[2:].fill_(torch.nan)
        out = case.run(case.kernel, states, state_step([(2, 1, 7), (4, 1, 0), *[(-1, 1, 0)] * 3], str(device)), at)
        assert out.isfinite().all() and not out[2:].any() and states.isfinite().all()
        assert not states[[0, 1, 3]].any()


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(dtype: torch.dtype, gate: kernels.Gate, gate_first: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    x, (z,) = 4 * torch.randn(9, 60, device=device), slices(9, 60, dtype=dtype, device=device)
    for channels in (20, 60):
        weight = torch.randn(channels, device=device).to(dtype)
        got = kernels.gated_norm(x, z, weight, 1e-6, 20, gate, gate_first=gate_first)
        expected = gated_norm_ref(x, z, weight, 1e-6, 20, gate, gate_first=gate_first)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=2 * torch.finfo(dtype).eps + 2e-6)


def test_readouts_beyond_half_precision_are_finite(device: torch.device) -> None:
    """Readouts of a float16 model stay float32 until they are normed."""
    case = Case("space", torch.float16, torch.float32, device)
    step, states = state_step([(3, 1, 9), (0, case.long, 0)], str(device)), case.states()
    found = case.run(case.kernel, states.normal_().mul_(1e6), step)[: 1 + case.long]
    assert found.abs().max() > torch.finfo(torch.float16).max
    weight, gates = torch.ones(found.shape[1:]).half().to(device), torch.ones(found.shape).half().to(device)
    assert kernels.gated_norm(found, gates, weight, 1e-6, found.shape[1], "silu", gate_first=False).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_readouts_of_delta_rules_keep_their_range(dtype: torch.dtype, device: torch.device) -> None:
    case = Case("delta", dtype, torch.float32, device)
    step, states = state_step([(3, 1, 9), (0, 1, 4)], str(device)), case.states()
    found = case.run(case.kernel, states.normal_().mul_(1e8), step)[:2]
    assert found.abs().max() > torch.finfo(torch.float16).max and found.isfinite().all()
