"""The references of state kernels: equal to transformers' functions, and however a sequence is cut into steps."""

from __future__ import annotations

import pytest
import torch
from support.state_steps import blocks_of, in_chunks, state_step
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from headrace.kernels.state.reference import (
    causal_conv_ref,
    delta_rule_ref,
    gated_norm_ref,
    selective_scan_ref,
    state_space_ref,
)

T = 71
CHUNKS = [(), (64,), (1, 1, 30), (37, 3)]


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype)


class DeltaCase:
    def __init__(
        self,
        key_heads: int,
        shared: int,
        dk: int,
        dv: int,
        *,
        by_channel: bool = False,
        decay: float = 0.0,
        keys: float = 100.0,
    ) -> None:
        """``keys``: of this size."""
        torch.manual_seed(7)
        heads = key_heads * shared
        self.shape = (heads, dv, dk)
        self.q, self.k = draw(T, key_heads, dk, scale=3), draw(T, key_heads, dk, scale=keys)
        self.v = draw(T, heads, dv)
        fades = heads * dk if by_channel else heads
        self.a, self.b = draw(T, fades) + decay, draw(T, heads)
        self.a_log, self.dt_bias = draw(heads, scale=0.5), draw(fades)

    @property
    def qkv(self) -> torch.Tensor:
        return torch.cat([each.flatten(1) for each in (self.q, self.k, self.v)], dim=1)

    @property
    def g(self) -> torch.Tensor:
        fade = torch.nn.functional.softplus(self.a + self.dt_bias).view(T, self.shape[0], -1)
        return (-self.a_log.exp()[:, None] * fade).squeeze(-1)

    def ours(self, state: torch.Tensor, block: int, chunks: tuple[int, ...] = (), wide: bool = False) -> torch.Tensor:
        qkv, a, b, a_log, dt_bias = (
            each.double() if wide else each for each in (self.qkv, self.a, self.b, self.a_log, self.dt_bias)
        )
        return in_chunks(
            lambda at, step: delta_rule_ref(qkv[at], a[at], b[at], a_log, dt_bias, state, step), T, chunks, block
        ).view(T, self.shape[0], -1)


@pytest.mark.parametrize("keys", [100.0, 3e-4])
@pytest.mark.parametrize("key_heads, shared, dk, dv", [(2, 2, 16, 16), (2, 3, 8, 24), (1, 1, 12, 4)])
def test_delta_rule_is_transformers(key_heads: int, shared: int, dk: int, dv: int, keys: float) -> None:
    """Keys of such sizes show whether they are normed, and where the norm has its epsilon."""
    case = DeltaCase(key_heads, shared, dk, dv, keys=keys)
    inputs = {"g": case.g[None], "beta": case.b[None].sigmoid(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    exact = blocks_of(3, *case.shape, dtype=torch.float64)
    wide = case.ours(exact, 2, wide=True)
    for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        expected, final = function(case.q[None], case.k[None], case.v[None], **inputs)
        state = blocks_of(3, *case.shape)
        torch.testing.assert_close(case.ours(state, 1), expected[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(state[1], final[0].transpose(1, 2), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(state[1].double(), exact[2], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(expected[0].double(), wide, atol=2e-6, rtol=1e-5)


def test_strong_decay_is_finite_and_forgets() -> None:
    case = DeltaCase(2, 2, 16, 16, decay=60.0)
    state = blocks_of(1, *case.shape)
    out = case.ours(state, 0)
    assert out.isfinite().all() and state.isfinite().all()
    assert case.g.max() < -8
    torch.testing.assert_close(in_chunks(lambda at, step: alone(case, at, step), T, (), 0), out.flatten(1), atol=1e-3, rtol=0)


def alone(case: DeltaCase, at: torch.Tensor, step: object) -> torch.Tensor:
    """Each token with a state of zeros."""
    out = []
    for token in at.tolist():
        one = [each[token : token + 1] for each in (case.qkv, case.a, case.b)]
        out.append(delta_rule_ref(*one, case.a_log, case.dt_bias, torch.zeros(1, *case.shape), state_step([(0, 1, 0)])))
    return torch.cat(out)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rule_however_it_is_cut(by_channel: bool, chunks: tuple[int, ...], dtype: torch.dtype) -> None:
    case = DeltaCase(2, 2, 16, 8, by_channel=by_channel)
    whole, cut = (blocks_of(2, *case.shape, dtype=dtype) for _ in range(2))
    assert torch.equal(case.ours(whole, 0), case.ours(cut, 1, chunks))
    assert torch.equal(whole[0], cut[1])
    assert not whole[1].any()


@pytest.mark.parametrize("keys", [100.0, 3e-4])
def test_decay_by_channel_is_kimis(keys: float) -> None:
    case = DeltaCase(3, 1, 16, 16, by_channel=True, keys=keys)
    expected, final = kimi.chunk_kimi_delta_attention(
        case.q[None],
        case.k[None],
        case.v[None],
        g=case.g[None],
        beta=case.b[None].sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state = blocks_of(1, *case.shape)
    torch.testing.assert_close(case.ours(state, 0), expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state[0], final[0].transpose(1, 2), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_is_transformers_at_every_phase_of_the_ring(taps: int, bias: bool) -> None:
    torch.manual_seed(taps)
    x, weight, added = draw(23, 20), draw(20, taps), draw(20) if bias else None
    expected = qwen.causal_conv1d_fn(x.T[None], weight, added, activation="silu")[0].T
    outs = []
    for chunks in ((), (1,) * 22, (5, 1, 1, 9), (2, 2)):
        cache = blocks_of(3, taps - 1, 20)
        outs.append(
            in_chunks(lambda at, step, cache=cache: causal_conv_ref(x[at], weight, added, "silu", cache, step), 23, chunks, 1)
        )
        rows = torch.arange(23 - taps + 1, 23)
        assert torch.equal(cache[1][rows % (taps - 1)], x[rows])
        assert not cache[0].any() and not cache[2].any()
    torch.testing.assert_close(outs[0], expected, atol=2e-6, rtol=1e-5)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.9)])
def test_state_space_is_transformers(groups: int, limit: tuple[float, float]) -> None:
    torch.manual_seed(3)
    heads, width, size = 4, 8, 16
    x, b, c, dt = draw(T, heads, width), draw(T, groups, size), draw(T, groups, size), draw(T, heads)
    a_log, d, dt_bias = draw(heads, scale=0.5), draw(heads), draw(heads)
    expected, final = mamba.mamba2_chunk_scan(
        x[None],
        dt[None],
        -a_log.exp(),
        b[None],
        c[None],
        chunk_size=16,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    xbc = torch.cat([each.flatten(1) for each in (x, b, c)], dim=1)
    results = []
    for chunks in CHUNKS:
        state = blocks_of(2, heads, width, size)
        out = in_chunks(
            lambda at, step, state=state: state_space_ref(xbc[at], dt[at], a_log, d, dt_bias, state, step, limit), T, chunks, 1
        )
        results.append((out, state[1]))
    torch.testing.assert_close(results[0][0].view(T, heads, width), expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(results[0][1], final[0], atol=2e-5, rtol=1e-4)
    assert all(torch.equal(out, results[0][0]) and torch.equal(state, results[0][1]) for out, state in results)


def test_selective_scan_is_transformers() -> None:
    torch.manual_seed(4)
    channels, size = 12, 8
    x, dt, b, c = draw(T, channels), draw(T, channels), draw(T, size), draw(T, size)
    rate, d, dt_bias = -draw(channels, size, scale=0.5).exp(), draw(channels), draw(channels)
    expected, final = jamba.mamba_selective_scan(
        *(each.t()[None] for each in (x, dt)),
        rate,
        *(each.t()[None] for each in (b, c)),
        D=d,
        delta_bias=dt_bias,
        delta_softplus=True,
        return_last_state=True,
    )
    for chunks in CHUNKS:
        state = blocks_of(2, channels, 1, size)
        out = in_chunks(
            lambda at, step, state=state: selective_scan_ref(x[at], dt[at], b[at], c[at], rate, d, dt_bias, state, step),
            T,
            chunks,
            1,
        )
        torch.testing.assert_close(out, expected[0].t(), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(state[1, :, 0], final[0], atol=2e-5, rtol=1e-4)


def test_rows_in_company_equal_each_alone_and_padding_rows_do_nothing() -> None:
    case, rows = DeltaCase(2, 2, 16, 16), [(3, 1, 9), (-1, 1, 0), (0, 20, 0), (-1, 4, 0), (2, 11, 64)]
    states = [blocks_of(5, *case.shape) for _ in range(2)]
    torch.manual_seed(1)
    for block in states[0]:
        block.normal_()
    states[1].copy_(states[0])
    tokens = sum(count for _, count, _ in rows)
    inputs = case.qkv[:tokens], case.a[:tokens], case.b[:tokens]
    together = delta_rule_ref(*inputs, case.a_log, case.dt_bias, states[0], state_step(rows))
    first = 0
    for block, count, start in rows:
        own = [each[first : first + count] for each in inputs]
        apart = delta_rule_ref(*own, case.a_log, case.dt_bias, states[1], state_step([(block, count, start)]))
        assert torch.equal(apart, together[first : first + count])
        assert block >= 0 or not apart.any()
        first += count
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norms_are_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, z = draw(9, 48, scale=4), draw(9, 48, scale=4, dtype=dtype)
    close = {"atol": 1e-6, "rtol": 3e-2 if dtype == torch.bfloat16 else 1e-5}
    by_head = qwen.Qwen3NextRMSNormGated(16, eps=1e-6).to(dtype)
    by_head.weight.data += draw(16, scale=0.3, dtype=dtype)
    got = gated_norm_ref(x, z, by_head.weight.data, 1e-6, 16)
    expected = by_head(x.to(dtype).view(-1, 16), z.view(-1, 16)).view(9, 48)
    torch.testing.assert_close(got, expected, **close)
    grouped = FalconH1RMSNormGated(48, eps=1e-5, n_groups=3, norm_before_gate=False).to(dtype)
    grouped.weight.data += draw(48, scale=0.3, dtype=dtype)
    got = gated_norm_ref(x, z, grouped.weight.data, 1e-5, 16, gate_first=True)
    torch.testing.assert_close(got, grouped(x.to(dtype)[None], z[None])[0], **close)
    norm = kimi.KimiLinearRMSNormGated(16, eps=1e-5).to(dtype)
    norm.weight.data += draw(16, scale=0.3, dtype=dtype)
    got = gated_norm_ref(x, z, norm.weight.data, 1e-5, 16, "sigmoid")
    torch.testing.assert_close(got, norm(x.to(dtype).view(-1, 16), z.view(-1, 16)).view(9, 48), **close)
