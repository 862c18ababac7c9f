"""Decode rows of the gated delta rule that write their states in some steps alone. Reference: ``delta_rule_ref``.

A step of a decode row mostly reads and writes its states. With k and u of the tokens since a state was written, and their sums
of log-decays c, this is what token t adds and reads, so that it reads the state S and need not write it::

    u_t = beta_t (v_t - exp(c_t) k_t S - sum_j exp(c_t - c_j) (k_t . k_j) u_j)
    out = exp(c_t) q_t S + sum_j exp(c_t - c_j) (q_t . k_j) u_j + (q_t . k_t) u_t
    S = exp(c_t) S + sum_j exp(c_t - c_j) k_j u_j + k_t u_t                         where it is written

Where it is written depends on a token's position alone.
"""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

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
H200, 64 rows take 48.6 us in 8 turns, 55.6 with as many registers as the compiler takes (165), and 52.1 in one turn; 8 rows
8.4 in 2 turns, 9.7 in 4 and 9.9 in one."""


@triton.jit
def _unit(at, mask):
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _held(at, first, in_key, live, DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr):
    value = first + tl.arange(0, VALUES)
    mask = (value < DV)[:, None] & in_key[None, :] & live
    return tl.load(at + value[:, None] * DK, mask=mask, other=0.0).to(tl.float32)


@launched(do_not_specialize=["heads"])
def _kept_rule(
    qkv,
    decay,
    beta,
    a_log,
    dt_bias,
    state,
    tokens,
    until,
    out,
    blocks,  # [R] int32
    starts,  # [R] int32
    heads,
    beta_factor,
    scale,
    qkv_row: tl.int64,
    decay_row: tl.int64,
    beta_row: tl.int64,
    state_block: tl.int64,
    tokens_block: tl.int64,
    tokens_row: tl.int64,
    until_block: tl.int64,
    SHARE: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    VALUES: tl.constexpr,
    TURNS: tl.constexpr,
    PERIOD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """``TURNS`` times ``VALUES`` rows of a head's state, which every PERIOD-th step writes; SHARE heads have one key head."""
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
    own, keys, own_values = head // SHARE * DK + channel, heads // SHARE * DK, heads // SHARE * DK + head * DV
    own_sum = keys + heads * DV + head
    kept, written = tokens + block * tokens_block, until + block * until_block + head * DV
    # No load waits for another's number but the block's: what is read of tokens that the state has is put out behind.
    first, count = tl.load(written + begins), start % PERIOD
    ks, sums = (), ()
    for slot in tl.static_range(PERIOD - 1):
        at, there = kept + slot * tokens_row, live & (slot < count)
        ks += (tl.load(at + own, mask=in_key & there, other=0.0),)
        sums += (tl.load(at + own_sum, mask=there, other=0.0),)
    if EARLY:
        wait(PDL)
    # A decode row has the token of its number.
    q, k = _unit(qkv + row * qkv_row + own, in_key) * scale, _unit(qkv + row * qkv_row + keys + own, in_key)
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
    now = kept + count * tokens_row
    for turn in range(TURNS):
        value = begins + turn * VALUES + tl.arange(0, VALUES)
        in_value = value < DV
        # The next turn's state is on its way while this one is computed.
        behind = _held(held_at, begins + (turn + 1) * VALUES, in_key, live & (turn + 1 < TURNS), DK, DV, VALUES)
        v = tl.load(qkv + row * qkv_row + keys + own_values + value, mask=in_value, other=0.0).to(tl.float32)
        weighed = ()
        for slot in tl.static_range(PERIOD - 1):
            added_at = kept + slot * tokens_row + own_values + value
            earlier = tl.load(added_at, mask=in_value & live & missing[slot], other=0.0)
            weighed += (tl.where(missing[slot], earlier * fades[slot], 0.0),)
        seen, result = faded * tl.sum(held * k[None, :], 1), faded * tl.sum(held * q[None, :], 1)
        for slot in tl.static_range(PERIOD - 1):
            seen += to_k[slot] * weighed[slot]
            result += to_q[slot] * weighed[slot]
        update = (v - seen) * strength
        result += both * update
        tl.store(out + (row * heads + head) * DV + value, tl.where(live, result, 0.0), mask=in_value)
        if count < PERIOD - 1:
            tl.store(now + own_values + value, update, mask=in_value & live)
        else:
            held = held * faded + update[:, None] * k[None, :]
            for slot in tl.static_range(PERIOD - 1):
                held += weighed[slot][:, None] * lacks[slot][None, :]
            place = held_at + value[:, None] * DK
            tl.store(place, held.to(state.dtype.element_ty), mask=in_value[:, None] & in_key[None, :] & live)
            tl.store(written + value, start + 1 + tl.zeros_like(value), mask=in_value & live)
        held = behind
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
    early: bool,
    out: torch.Tensor,
) -> None:
    """The gated delta rule of the decode rows; writes their tokens in ``out``. Each input's channels lie side by side, and a
    decay is that of a whole head."""
    heads, value_dim, key_dim = state.shape[1:]
    values = min(_VALUES, power_of_two(value_dim))
    turns = _turns(cdiv(value_dim, values) * heads * step.decode_rows, resources(qkv.device))
    _kept_rule[(cdiv(value_dim, values * turns), heads, step.decode_rows)](
        qkv,
        decay,
        beta,
        a_log,
        dt_bias,
        state,
        *pending,
        out,
        step.blocks,
        step.starts,
        heads,
        float(beta_factor),
        key_dim**-0.5,
        qkv.stride(0),
        decay.stride(0),
        beta.stride(0),
        state.stride(0),
        *pending.tokens.stride()[:2],
        pending.until.stride(0),
        SHARE=2 * heads * key_dim // (qkv.shape[1] - heads * value_dim),
        DK=key_dim,
        DK_P=power_of_two(key_dim),
        DV=value_dim,
        VALUES=values,
        TURNS=turns,
        PERIOD=pending.tokens.shape[1] + 1,
        EARLY=early,
        num_warps=1,
        maxnreg=_REGISTERS,
        **options(qkv.device),
    )
