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
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, begin, options, wait

_VALUES = 8
"""Rows of a head's state of one program, at most. It has one warp, so that no token waits for others to add up."""
_REGISTERS = 96
"""Registers of a thread where not all programs run at once: with fewer, more of them do. 64 rows take 63.5 us, 71.9 with as
many as the compiler takes (122) and 77.3 with 80; 8 rows would take 12.2 in place of 11.3 (H100)."""


@triton.jit
def _unit(at, mask):
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


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
    PERIOD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """``VALUES`` rows of a head's state; SHARE heads have one key head. Every PERIOD-th position's step writes them."""
    if EARLY:
        announce(PDL)
    else:
        begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    channel = tl.arange(0, DK_P)
    in_value, in_key = value < DV, channel < DK
    block, start = tl.load(blocks + row).to(tl.int64), tl.load(starts + row)
    live, block = block >= 0, tl.maximum(block, 0)
    place = state + block * state_block + (head * DV + value[:, None]) * DK + channel[None, :]
    inside = in_value[:, None] & in_key[None, :] & live
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    rate, added = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    own, keys, own_values = head // SHARE * DK + channel, heads // SHARE * DK, heads // SHARE * DK + head * DV + value
    own_sum = keys + heads * DV + head
    kept, written = tokens + block * tokens_block, until + block * until_block + head * DV
    # No load waits for another's number but the block's: what is read of tokens that the state has is put out behind.
    first, count = tl.load(written + tl.program_id(0) * VALUES), start % PERIOD
    ks, updates, sums = (), (), ()
    for slot in tl.static_range(PERIOD - 1):
        at, there = kept + slot * tokens_row, live & (slot < count)
        ks += (tl.load(at + own, mask=in_key & there, other=0.0),)
        updates += (tl.load(at + own_values, mask=in_value & there, other=0.0),)
        sums += (tl.load(at + own_sum, mask=there, other=0.0),)
    if EARLY:
        wait(PDL)
    # A decode row has the token of its number.
    q, k = _unit(qkv + row * qkv_row + own, in_key) * scale, _unit(qkv + row * qkv_row + keys + own, in_key)
    v = tl.load(qkv + row * qkv_row + keys + own_values, mask=in_value, other=0.0).to(tl.float32)
    strength = beta_factor * tl.sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32))
    fade = rate * softplus(tl.load(decay + row * decay_row + head).to(tl.float32) + added)
    for slot in tl.static_range(PERIOD - 1):
        fade += tl.where((slot == count - 1) & (start - 1 >= first), sums[slot], 0.0)
    faded = tl.exp(fade)
    seen, result = faded * tl.sum(held * k[None, :], 1), faded * tl.sum(held * q[None, :], 1)
    lacks, weighed = (), ()
    for slot in tl.static_range(PERIOD - 1):
        missing = (slot < count) & (start - count + slot >= first)
        lacks += (tl.where(missing, ks[slot], 0.0),)
        weighed += (tl.where(missing, updates[slot] * tl.exp(tl.minimum(fade - sums[slot], 0.0)), 0.0),)
        seen += tl.sum(lacks[slot] * k, 0) * weighed[slot]
        result += tl.sum(lacks[slot] * q, 0) * weighed[slot]
    update = (v - seen) * strength
    result += tl.sum(q * k, 0) * update
    tl.store(out + (row * heads + head) * DV + value, tl.where(live, result, 0.0), mask=in_value)
    if count < PERIOD - 1:
        now = kept + count * tokens_row
        tl.store(now + own_values, update, mask=in_value & live)
        if tl.program_id(0) == 0:
            tl.store(now + own_sum, fade, mask=live)
            if head % SHARE == 0:
                tl.store(now + own, k, mask=in_key & live)
    else:
        held = held * faded + update[:, None] * k[None, :]
        for slot in tl.static_range(PERIOD - 1):
            held += weighed[slot][:, None] * lacks[slot][None, :]
        tl.store(place, held.to(state.dtype.element_ty), mask=inside)
        tl.store(written + value, start + 1 + tl.zeros_like(value), mask=in_value & live)


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
    _kept_rule[(cdiv(value_dim, values), heads, step.decode_rows)](
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
        PERIOD=pending.tokens.shape[1] + 1,
        EARLY=early,
        num_warps=1,
        maxnreg=None if early else _REGISTERS,
        **options(qkv.device),
    )
