"""MLA: absorbed and uncompressed attention equal the definition over the keys and values of all heads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import Case, make_case

from headrace.attention import mla, select
from headrace.attention.backend import AttentionInputs
from headrace.attention.context import ForwardContext
from headrace.attention.mla import MLAAttention, MLABackend
from headrace.attention.reference import ReferenceAttention
from headrace.cache.layer import LayerCache
from headrace.cache.planes import write_mla
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, MLASpec, layer_kv
from headrace.model_spec.projection import input_matrices

from .test_triton import to

HERE = [
    name
    for name in ("reference", "torch", "native")
    if not select.refusals(
        AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=2, scale=1.0), "cpu", "float32"
    )[name]
]
MIXED = [(1, 9), (1, 1), (1, 30), (5, 5), (24, 24), (3, 40), (20, 51), (1, 7), (40, 40)]
"""Decode rows, short chunks and long ones, with and without a prefix. The one-token row behind them is a prompt's."""


def mla_spec(**changes: object) -> AttentionSpec:
    values: dict = {
        "layer": 0,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 36,
        "v_head_dim": 32,
        "rotary_dim": 4,
        "scale": 0.3,
        "mla": MLASpec(head_dim=10, v_head_dim=5),
    }
    return AttentionSpec(**{**values, **changes})


def projection(spec: AttentionSpec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    assert spec.mla is not None
    width = spec.mla.head_dim - spec.rotary_dim + spec.mla.v_head_dim
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(spec.num_heads * width, spec.v_head_dim, generator=generator) * spec.v_head_dim**-0.5).to(dtype)


def oracle(case: Case, up: torch.Tensor) -> torch.Tensor:
    """The reference over a cache in which every head has its own keys and values."""
    spec = case.cache.spec
    full, rows = spec.uncompressed, case.cache.rows.double()
    others = (rows[..., spec.rotary_dim :] @ up.double().T).view(*rows.shape[:2], full.num_heads, -1)
    rotated = rows[..., : spec.rotary_dim].expand(-1, -1, full.num_heads, -1)
    backend = ReferenceAttention()
    backend.plan(case.step)
    return backend.run(AttentionInputs(case.q.double(), LayerCache(full, 0, torch.cat((rotated, others), dim=-1))))


def make_backend(spec: AttentionSpec, name: str, dtype: str = "float32") -> MLABackend:
    (backend,) = select.create_for([spec], [name], "cpu", dtype)
    assert isinstance(backend, MLABackend)
    return backend


def check(case: Case, name: str = "torch", tolerance: float = 2e-5) -> MLABackend:
    up = projection(case.cache.spec, case.q.dtype)
    backend = make_backend(case.cache.spec, name, str(case.q.dtype).removeprefix("torch."))
    backend.plan(case.step)
    got = backend.attend(case.q, case.cache, up)
    assert got.dtype == case.q.dtype
    total = case.step.num_tokens
    torch.testing.assert_close(got[:total].double(), oracle(case, up)[:total], atol=tolerance, rtol=1e-3)
    return backend


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", HERE)
def test_mixed_rows(name: str, block_size: int) -> None:
    case = make_case(mla_spec(), MIXED, block_size=block_size)
    case.step = dataclasses.replace(case.step, num_decode_rows=3)
    assert check(case, name).uncompressed_rows == [4, 6, 8]


@pytest.mark.parametrize("name", HERE)
def test_decode_rows_of_several_queries(name: str) -> None:
    """One and the tokens that were guessed behind it."""
    case = make_case(mla_spec(), [(3, 9), (1, 40), (4, 21), (17, 23)])
    case.step = dataclasses.replace(case.step, num_decode_rows=3)
    assert check(case, name).uncompressed_rows == [3]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("rows", [[(1, 5), (1, 12)], [(30, 30), (25, 60)], [(1, 3), (2, 9)], [(1, 1), (33, 33)]], ids=str)
def test_rows_of_one_kind(rows: list[tuple[int, int]], name: str) -> None:
    check(make_case(mla_spec(), rows, seed=2, wide=2), name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_geometry(data: st.DataObject) -> None:
    rotated = 2 * data.draw(st.integers(0, 4), "rotated pairs")
    rank = data.draw(st.integers(1, 70), "rank")
    spec = mla_spec(
        num_heads=data.draw(st.integers(1, 9), "heads"),
        head_dim=rotated + rank,
        v_head_dim=rank,
        rotary_dim=rotated,
        window=data.draw(st.one_of(st.none(), st.integers(1, 40)), "window"),
        mla=MLASpec(
            head_dim=rotated + data.draw(st.integers(1, 20), "other channels"),
            v_head_dim=data.draw(st.integers(1, 20), "value channels"),
        ),
    )
    decodes = data.draw(st.lists(st.integers(1, 60), max_size=3), "decode rows")
    prompts = data.draw(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), max_size=3), "prompts: tokens, prefix")
    rows = [(1, length) for length in decodes] + [(count, count + prefix) for count, prefix in prompts]
    case = make_case(spec, rows, block_size=data.draw(st.sampled_from([1, 3, 16]), "block size"))
    case.step = dataclasses.replace(case.step, num_decode_rows=len(decodes))
    check(case, data.draw(st.sampled_from(HERE), "backend"))


def test_no_rows() -> None:
    check(make_case(mla_spec(), []))


def test_padding_tokens_come_out_as_zeros() -> None:
    for rows in ([(1, 4)], [(1, 4), (30, 30)]):
        case = make_case(mla_spec(), rows, extra_tokens=2)
        backend = check(case)
        assert (backend.attend(case.q, case.cache, projection(case.cache.spec))[-2:] == 0).all()


def test_decode_rows_are_absorbed_however_long() -> None:
    """A step of decode rows runs the same kernels for any lengths."""
    case = make_case(mla_spec(), [(1, 500), (1, 3)])
    assert check(case).uncompressed_rows == []


def test_bounded_steps_are_absorbed() -> None:
    """Their lengths are bounds, so that nothing can be sized by them."""
    case = make_case(mla_spec(), [(1, 5), (40, 40)])
    exact = oracle(case, projection(case.cache.spec))
    backend = make_backend(case.cache.spec, "reference")
    backend.plan(dataclasses.replace(case.step, bounded=True))
    torch.testing.assert_close(
        backend.attend(case.q, case.cache, projection(case.cache.spec)).double(), exact, atol=2e-5, rtol=1e-3
    )
    assert backend.uncompressed_rows == []


def test_what_would_not_pay_is_not_uncompressed() -> None:
    """The latent is no wider than the keys and values that are made of it."""
    spec = mla_spec(head_dim=9, v_head_dim=5)
    assert check(make_case(spec, [(50, 50)])).uncompressed_rows == []


def test_heads_and_rows_take_turns_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(mla_spec(num_heads=5), MIXED)
    sizes = [-(-length // 4) * 4 for count, length in MIXED if count >= 20]
    for head_width in (1, 26 * max(sizes), 26 * sum(sizes), 2 * 26 * sum(sizes)):
        monkeypatch.setattr(mla, "WORKSPACE_BYTES", 4 * head_width)
        backend = check(case)
        # Planned again, and for other rows.
        backend.plan(case.step)
        check(case)
        case = make_case(mla_spec(num_heads=5), MIXED, seed=head_width)


def test_rows_grouped() -> None:
    groups = mla._grouped(np.array([3, 4, 6, 7]), np.array([5, 5, 20, 1]), 10)
    assert [group.tolist() for group in groups] == [[3, 4], [6], [7]]
    assert mla._grouped(np.array([], dtype=np.int64), np.array([]), 10) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype: torch.dtype) -> None:
    check(make_case(mla_spec(), MIXED, dtype=dtype), tolerance=4e-2)


@pytest.mark.parametrize("rotary_dim", [0, 4])
def test_windows_and_caps(rotary_dim: int) -> None:
    spec = mla_spec(window=7, soft_cap=1.5, rotary_dim=rotary_dim, head_dim=32 + rotary_dim)
    check(make_case(spec, MIXED))


def test_the_inner_attention() -> None:
    """Rotates, writes one row a token and attends: token by token as all at once."""
    spec = mla_spec()
    layer, up = MLAAttention(spec), projection(spec)
    norm = RMSNorm(32, 1e-6, dtype=torch.float32, device="cpu")
    norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(1)
    q, compressed = torch.randn(26, 3, 10, generator=generator), torch.randn(26, 36, generator=generator)
    angles = torch.arange(26)[:, None] * torch.tensor([1.0, 0.1])
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def forward(chunks: list[int], normed: bool = False) -> torch.Tensor:
        cache = LayerCache(spec, 0, torch.zeros(8, 4, 1, 36))
        backend, out, start = make_backend(spec, "torch"), [], 0
        for count in chunks:
            here, end = slice(start, start + count), start + count
            step = make_case(spec, [(count, end)]).step
            table = torch.arange(1, 8, dtype=torch.int32)[None]
            step = dataclasses.replace(
                step,
                num_decode_rows=int(count == 1),
                block_tables=(table,),
                slot_mapping=(torch.arange(4 + start, 4 + end),),
            )
            backend.plan(step)
            ctx = ForwardContext(step, [cache], [backend])
            if normed:
                out.append(
                    layer(q[here], torch.cat((compressed[:, :4], norm(compressed[:, 4:])), 1)[here], up, ctx, cos_sin[here])
                )
            else:
                out.append(layer.forward_qkv(q[here].clone(), compressed[here], norm, up, ctx, cos_sin[here]))
            start = end
        return torch.cat(out)

    whole = forward([26])
    assert whole.shape == (26, 15)
    torch.testing.assert_close(forward([26], normed=True), whole)
    for chunks in ([1] * 26, [9, 17], [20, 1, 1, 4]):
        torch.testing.assert_close(forward(chunks), whole, atol=2e-5, rtol=1e-4)


def test_one_row_a_token_and_no_slot_no_write() -> None:
    spec = mla_spec()
    cache = LayerCache(spec, 0, torch.zeros(3, 2, 1, 36))
    assert layer_kv(spec, "bfloat16").bytes_per_token == 72
    assert cache.keys.data_ptr() == cache.rows.data_ptr()
    assert cache.values.data_ptr() == cache.rows.data_ptr() + 4 * 4
    row = torch.randn(3, 1, 36)
    write_mla(cache, row, torch.tensor([5, -1, 2]))
    flat = cache.rows.view(6, 1, 36)
    assert torch.equal(flat[[5, 2]], row[[0, 2]])
    assert (flat[[0, 1, 3, 4]] == 0).all()
    assert torch.equal(cache.values[1, 0], row[2][:, 4:])


def test_a_layer_that_rotates_needs_angles() -> None:
    spec = mla_spec()
    layer, up = MLAAttention(spec), projection(spec)
    case = make_case(spec, [(1, 1)])
    step = dataclasses.replace(case.step, slot_mapping=(torch.zeros(1, dtype=torch.int64),))
    ctx = ForwardContext(step, [case.cache], [make_backend(spec, "torch")])
    with pytest.raises(ValueError, match="cos_sin is missing"):
        layer(case.q, torch.zeros(1, 36), up, ctx)


def test_widths() -> None:
    spec = mla_spec(mla=MLASpec(head_dim=10, v_head_dim=5, q_rank=7))
    assert (spec.q_size, spec.k_size, spec.v_size, spec.out_size, spec.row_width) == (30, 36, 0, 15, 36)
    assert spec.matrices(20) == [(7, 20), (30, 7), (36, 20), (33, 32), (20, 15)]
    assert mla_spec().matrices(20)[0] == (30, 20)
    assert np.prod(projection(spec).shape) == 33 * 32
    with pytest.raises(ConfigError, match="layer 0 keeps compressed KV"):
        input_matrices(spec)
    with pytest.raises(ValueError, match="layer 0"):
        _ = spec.uncompressed.uncompressed


@pytest.mark.skipif(support.refusals("cpu") == ["Triton is not installed"], reason="Triton is not installed")
@pytest.mark.parametrize("bounded", [False, True])
def test_on_triton(bounded: bool, device: torch.device) -> None:
    """The general kernel, whose values are channels of its keys."""
    on_triton(mla_spec(), MIXED, device, bounded=bounded)


NARROW = {"num_heads": 4, "head_dim": 64, "v_head_dim": 48, "rotary_dim": 16, "mla": MLASpec(head_dim=32, v_head_dim=20)}
FULL = {
    "num_heads": 4,
    "head_dim": 576,
    "v_head_dim": 512,
    "rotary_dim": 64,
    "mla": MLASpec(head_dim=192, v_head_dim=128),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("bounded", [False, True], ids=["by work", "absorbed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [NARROW, FULL], ids=["narrow", "full"])
@pytest.mark.parametrize("rows", [[(1, 40), (1, 90), (1, 3)], [(80, 80)], [(33, 33)], [(5, 60), (200, 210)]], ids=str)
def test_on_a_gpu(rows: list[tuple[int, int]], changes: dict, dtype: torch.dtype, bounded: bool) -> None:
    """Rows whose sums are as large as a model's, in each type and at both ends of the choice."""
    step = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    on_triton(mla_spec(**changes, scale=0.1), rows, torch.device("cuda"), bounded=bounded, dtype=dtype, tolerance=step)


def on_triton(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    device: torch.device,
    *,
    bounded: bool,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 5e-5,
) -> None:
    case = make_case(spec, rows, dtype=dtype, block_size=16 if dtype != torch.float32 else 4)
    first = next((place for place, (count, _) in enumerate(rows) if count > 1), len(rows))
    case.step = dataclasses.replace(case.step, num_decode_rows=first, bounded=bounded)
    up = projection(case.cache.spec, dtype)
    expected = oracle(case, up)
    moved = to(case, device)
    backend = MLABackend(case.cache.spec, select.create("triton"), lambda: select.create("triton"))
    backend.plan(moved.step)
    got = backend.attend(moved.q, moved.cache, up.to(device)).cpu()
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=max(1e-3, tolerance))


def test_batch_invariant_layers_uncompress_nothing() -> None:
    """The rows that are worth it depend on how much of a prompt is in a step."""
    name = "invariant"
    assert select.for_prompts(mla_spec(), name, "cuda", "bfloat16") is None
    case = make_case(mla_spec(), MIXED)
    up = projection(case.cache.spec)
    sometimes = MLABackend(case.cache.spec, select.create("reference"), lambda: select.create("reference"))
    never = MLABackend(case.cache.spec, select.create("reference"), None)
    for backend in (sometimes, never):
        backend.plan(case.step)
        got = backend.attend(case.q, case.cache, up)
        torch.testing.assert_close(got.double(), oracle(case, up), atol=5e-5, rtol=1e-3)
    assert sometimes.uncompressed_rows and not never.uncompressed_rows
