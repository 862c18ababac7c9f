"""Decode rows of the gated delta rule that write their states in some steps alone. Reference: ``delta_rule_ref``.

A step of a decode row mostly reads and writes its states. With k and u of the tokens since a state was written, and their sums
of log-decays c, this is what token t adds and reads, so that it reads the state S and need not write it::

    u_t = beta_t (v_t - exp(c_t) k_t S - sum_j exp(c_t - c_j) (k_t . k_j) u_j)
    out = exp(c_t) q_t S + sum_j exp(c_t - c_j) (q_t . k_j) u_j + (q_t . k_t) u_t
    S = exp(c_t) S + sum_j exp(c_t - c_j) k_j u_j + k_t u_t                         where it is written

Where it is written depends on a token's position alone.
"""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.state.metadata import Pending, StateMetadata
from headrace.kernels.state.triton_tiles import softplus
from headrace.kernels.support import Resources, cdiv, power_of_two, resources
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, begin, options, wait

_VALUES = 8
"""Rows of a head's state of one program, at most. It has one warp, so that no token waits for others to add up."""
_MOST_TURNS = 8
"""Turns of a program, each with as many rows of the state, at most. What does not depend on these is computed once."""
_REGISTERS, _SIDE_BY_SIDE = 128, 15
"""Registers of a thread, and the programs for each multiprocessor that then run at once, which there are to be at least. On an
H200, 64 rows take 47.8 us in 8 turns, and 8 rows 7.9 in 2; more registers, or more or fewer turns, were slower."""


@triton.jit
def _unit(at, mask):
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _held(at, first, in_key, live, DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr):
    value = first + tl.arange(0, VALUES)
    mask = (value < DV)[:, None] & in_key[None, :] & live
    return tl.load(at + value[:, None] * DK, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _readings(
    held, held_at, q, k, scratch, plane, begins, in_key, live, DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    TURNS: tl.constexpr
):  # fmt: skip
    """``held k`` and ``held q`` of all turns, of which ``held`` is the first; by way of ``scratch [2, plane]``."""
    seen, result = tl.sum(held * k[None, :], 1), tl.sum(held * q[None, :], 1)
    if TURNS > 1:
        value = tl.arange(0, VALUES)
        for turn in range(TURNS):
            # The next turn's state is on its way while this one is computed.
            behind = _held(held_at, begins + (turn + 1) * VALUES, in_key, live & (turn + 1 < TURNS), DK, DV, VALUES)
            place, mask = scratch + turn * VALUES + value, begins + turn * VALUES + value < DV
            tl.store(place, tl.sum(held * k[None, :], 1), mask=mask)
            tl.store(place + plane, tl.sum(held * q[None, :], 1), mask=mask)
            held = behind
        # All threads see what others have stored.
        tl.debug_barrier()
        each = tl.arange(0, VALUES * TURNS)
        seen = tl.load(scratch + each, mask=begins + each < DV, other=0.0)
        result = tl.load(scratch + plane + each, mask=begins + each < DV, other=0.0)
    return seen, result


@triton.jit
def _write_turns(
    held, held_at, q, k, faded, strength, both, earlier, values, kept, out, tokens_row, begins, in_key, live, DK: tl.constexpr,
    DV: tl.constexpr, VALUES: tl.constexpr, TURNS: tl.constexpr, PERIOD: tl.constexpr
):  # fmt: skip
    """Reads, advances and writes the states of all turns, of which ``held`` is the first."""
    lacks, missing, fades, to_k, to_q = earlier
    for turn in range(TURNS):
        behind = _held(held_at, begins + (turn + 1) * VALUES, in_key, live & (turn + 1 < TURNS), DK, DV, VALUES)
        value = turn * VALUES + tl.arange(0, VALUES)
        in_value = begins + value < DV
        seen, result = faded * tl.sum(held * k[None, :], 1), faded * tl.sum(held * q[None, :], 1)
        held = held * faded
        for slot in tl.static_range(PERIOD - 1):
            place = kept + slot * tokens_row + value
            update = tl.load(place, mask=in_value & live & missing[slot], other=0.0)
            weighed = tl.where(missing[slot], update * fades[slot], 0.0)
            seen += to_k[slot] * weighed
            result += to_q[slot] * weighed
            held += weighed[:, None] * lacks[slot][None, :]
        v = tl.load(values + value, mask=in_value, other=0.0).to(tl.float32)
        update = (v - seen) * strength
        result += both * update
        tl.store(out + value, tl.where(live, result, 0.0), mask=in_value)
        held += update[:, None] * k[None, :]
        state_at = held_at + (begins + value)[:, None] * DK
        tl.store(state_at, held, mask=in_value[:, None] & in_key[None, :] & live)
        held = behind


@launched(do_not_specialize=["heads"])
def _kept_rule(
    qkv, decay, beta, a_log, dt_bias, state, tokens, until, scratch, out, blocks, starts, heads, beta_factor, scale,
    qkv_row: tl.int64, decay_row: tl.int64, beta_row: tl.int64, state_block: tl.int64, tokens_block: tl.int64,
    tokens_row: tl.int64, until_block: tl.int64, SHARE: tl.constexpr, DK: tl.constexpr, DK_P: tl.constexpr, DV: tl.constexpr,
    VALUES: tl.constexpr, TURNS: tl.constexpr, PERIOD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``TURNS`` times ``VALUES`` rows of a head's state, which every PERIOD-th step writes; SHARE heads have one key head.

    Where a state is only read, what the tokens that it lacks add is computed for all turns at once, behind them: ``scratch``
    ``[R, 2, heads * DV]`` float32 holds their readings meanwhile.
    """
    if EARLY:
        announce(PDL)
    else:
        begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, DK_P)
    in_key = channel < DK
    block, start = tl.load(blocks + row).to(tl.int64), tl.load(starts + row)
    live, block = block >= 0, tl.maximum(block, 0)
    begins = tl.program_id(0) * VALUES * TURNS
    held_at = state + block * state_block + head * DV * DK + channel[None, :]
    held = _held(held_at, begins, in_key, live, DK, DV, VALUES)
    rate, added = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    own, keys = head // SHARE * DK + channel, heads // SHARE * DK
    at, own_sum = head * DV + begins, keys + heads * DV + head
    each = tl.arange(0, VALUES * TURNS)
    inside = begins + each < DV
    kept, written = tokens + block * tokens_block, until + block * until_block + at
    # No load waits for another's number but the block's: what is read of tokens that the state has is put out behind.
    first, count = tl.load(written), start % PERIOD
    ks, us, sums = (), (), ()
    for slot in tl.static_range(PERIOD - 1):
        place, there = kept + slot * tokens_row, live & (slot < count)
        ks += (tl.load(place + own, mask=in_key & there, other=0.0),)
        us += (tl.load(place + keys + at + each, mask=inside & there, other=0.0),)
        sums += (tl.load(place + own_sum, mask=there, other=0.0),)
    if EARLY:
        wait(PDL)
    # A decode row has the token of its number.
    inputs = qkv + row * qkv_row
    q, k = _unit(inputs + own, in_key) * scale, _unit(inputs + keys + own, in_key)
    v = tl.load(inputs + 2 * keys + at + each, mask=inside, other=0.0).to(tl.float32)
    strength = beta_factor * tl.sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32))
    fade = rate * softplus(tl.load(decay + row * decay_row + head).to(tl.float32) + added)
    for slot in tl.static_range(PERIOD - 1):
        fade += tl.where((slot == count - 1) & (start - 1 >= first), sums[slot], 0.0)
    faded, both = tl.exp(fade), tl.sum(q * k, 0)
    missing, lacks, fades, to_k, to_q = (), (), (), (), ()
    for slot in tl.static_range(PERIOD - 1):
        missing += ((slot < count) & (start - count + slot >= first),)
        lacks += (tl.where(missing[slot], ks[slot], 0.0),)
        fades += (tl.exp(tl.minimum(fade - sums[slot], 0.0)),)
        to_k += (tl.sum(lacks[slot] * k, 0),)
        to_q += (tl.sum(lacks[slot] * q, 0),)
    now, plane = kept + count * tokens_row, heads * DV
    if count < PERIOD - 1:
        own_scratch = scratch + row * 2 * plane + at
        seen, result = _readings(held, held_at, q, k, own_scratch, plane, begins, in_key, live, DK, DV, VALUES, TURNS)
        seen, result = faded * seen, faded * result
        for slot in tl.static_range(PERIOD - 1):
            weighed = tl.where(missing[slot], us[slot] * fades[slot], 0.0)
            seen += to_k[slot] * weighed
            result += to_q[slot] * weighed
        update = (v - seen) * strength
        tl.store(out + row * plane + at + each, tl.where(live, result + both * update, 0.0), mask=inside)
        tl.store(now + keys + at + each, update, mask=inside & live)
    else:
        earlier, places = (
            (lacks, missing, fades, to_k, to_q),
            (inputs + 2 * keys + at, kept + keys + at, out + row * plane + at),
        )
        _write_turns(
            held, held_at, q, k, faded, strength, both, earlier, *places, tokens_row, begins, in_key, live, DK, DV, VALUES,
            TURNS, PERIOD,
        )  # fmt: skip
        tl.store(written + each, start + 1 + tl.zeros_like(each), mask=inside & live)
    if (count < PERIOD - 1) & (tl.program_id(0) == 0):
        tl.store(now + own_sum, fade, mask=live)
        if head % SHARE == 0:
            tl.store(now + own, k, mask=in_key & live)


def _turns(parts: int, device: Resources) -> int:
    """Turns of each program, where there are ``parts`` in all."""
    return min(1 << (max(parts // (_SIDE_BY_SIDE * device.multiprocessors), 1).bit_length() - 1), _MOST_TURNS)


def delta_rows(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    beta_factor: int,
    pending: Pending,
    out: torch.Tensor,
) -> None:
    """The gated delta rule of the decode rows; writes their tokens in ``out``. Each input's channels lie side by side, and a
    decay is that of a whole head."""
    heads, value_dim, key_dim = state.shape[1:]
    values = min(_VALUES, power_of_two(value_dim))
    turns = _turns(cdiv(value_dim, values) * heads * step.decode_rows, resources(qkv.device))
    _kept_rule[(cdiv(value_dim, values * turns), heads, step.decode_rows)](
        qkv, decay, beta, a_log, dt_bias, state, *pending,
        torch.empty(step.decode_rows, 2, heads * value_dim, device=qkv.device), out, step.blocks, step.starts, heads,
        float(beta_factor), key_dim**-0.5, qkv.stride(0), decay.stride(0), beta.stride(0), state.stride(0),
        *pending.tokens.stride()[:2], pending.until.stride(0), SHARE=2 * heads * key_dim // (qkv.shape[1] - heads * value_dim),
        DK=key_dim, DK_P=power_of_two(key_dim), DV=value_dim, VALUES=values, TURNS=turns, PERIOD=pending.tokens.shape[1] + 1,
        EARLY=not step.prompt_rows, num_warps=1, maxnreg=_REGISTERS, **options(qkv.device),
    )  # fmt: skip
