"""The native kernels against their plain-torch references."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels import activation, norm, rotary
from headrace.kernels.activation.reference import silu_mul_ref
from headrace.kernels.native import NativeKernels, library
from headrace.kernels.native.library import load
from headrace.kernels.norm.reference import rms_norm_ref
from headrace.kernels.rotary.reference import rotate_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def chosen(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions under test use the kernels of the test's instruction set."""
    monkeypatch.setattr(library, "load", lambda: kernels)


def ulps(dtype: torch.dtype) -> float:
    return 2 * torch.finfo(dtype).eps


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=ulps(got.dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 1, 7), (40, 1000), (0, 16), (5, 1)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1]).to(dtype)
    close(norm.rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))
    got, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(got, rms_norm_ref(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_a_slice(dtype: torch.dtype) -> None:
    """q's heads in a fused projection: not contiguous."""
    qkv, weight = torch.randn(4, 10, 24).to(dtype), torch.randn(24).to(dtype)
    close(norm.rms_norm(qkv[:, 2:5], weight, 1e-6), rms_norm_ref(qkv[:, 2:5], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_with_weights_less_one_is_hugging_faces(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    reference = Gemma3RMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data.normal_(std=0.3)
    x, residual = torch.randn(9, 64).to(dtype), torch.randn(9, 64).to(dtype)
    close(norm.rms_norm(x, reference.weight, 1e-5, offset=True), reference(x))
    got, total = norm.add_rms_norm(x, residual, reference.weight, 1e-5, offset=True)
    assert torch.equal(total, x + residual)
    close(got, reference(x + residual))


def test_norm_is_hugging_faces() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    reference = LlamaRMSNorm(64, eps=1e-5).bfloat16()
    reference.weight.data.normal_()
    x = torch.randn(9, 64).bfloat16()
    assert torch.equal(rms_norm_ref(x, reference.weight, 1e-5), reference(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 3072), (2, 3, 34), (0, 8)])
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (8 * torch.randn(shape)).to(dtype)
    close(activation.silu_mul(x), silu_mul_ref(x))


def test_silu_mul_of_extremes() -> None:
    gate = torch.tensor([-1e30, -100.0, -90.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e30, torch.inf])
    gate_up = torch.cat((gate, torch.ones(10)))
    torch.testing.assert_close(activation.silu_mul(gate_up), silu_mul_ref(gate_up), rtol=1e-5, atol=1e-30)
    assert activation.silu_mul(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "rotary_dim"), [(64, 64), (80, 20), (6, 2), (16, 16)])
def test_rotate(width: int, rotary_dim: int, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens = 6, 2, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width).to(dtype)
    q, k, _ = (part.unflatten(1, (-1, width)) for part in qkv.split([heads * width, kv_heads * width, kv_heads * width], 1))
    angles = torch.randn(tokens, rotary_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    for got, expected in zip(rotary.rotate(q, k, cos_sin, rotary_dim), rotate_ref(q, k, cos_sin, rotary_dim), strict=True):
        torch.testing.assert_close(got, expected, rtol=ulps(dtype), atol=1e-6)
        assert got.is_contiguous()
    only, none = rotary.rotate(q, q[:, :0], cos_sin, rotary_dim)
    assert torch.equal(only, rotary.rotate(q, k, cos_sin, rotary_dim)[0])
    assert none.shape == (tokens, 0, width)


def test_rotation_is_hugging_faces() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, angles = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 8)
    twice = torch.cat((angles, angles), 1)
    expected = apply_rotary_pos_emb(q, k, twice.cos(), twice.sin(), unsqueeze_dim=1)
    got = rotate_ref(q, k, torch.cat((angles.cos(), angles.sin()), 1), 16)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("between", [0, 10])
@pytest.mark.parametrize(("width", "v_width", "rotary_dim"), [(64, 64, 64), (24, 8, 12), (7, 13, 0)])
def test_rotate_and_write(
    width: int, v_width: int, rotary_dim: int, between: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``between``: numbers of other layers between two blocks of the cache."""
    heads, kv_heads, tokens = 6, 2, 9
    q, k = torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, kv_heads, width).to(dtype)
    v = torch.randn(tokens, kv_heads, v_width).to(dtype)
    angles = torch.randn(tokens, rotary_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    slots = torch.tensor([3, 17, -1, 4, 0, 30, -1, 31, 9])
    shape = (4, kv_heads, width + v_width)
    arenas = [torch.full((8, math.prod(shape) + between), 7.0, dtype=dtype) for _ in range(2)]
    rows = [arena[:, between:].unflatten(1, shape) for arena in arenas]
    got = rotary.rotate_and_write(q, k, v, cos_sin, rotary_dim, rows[0], slots)
    monkeypatch.setattr(library, "load", lambda: None)
    expected = rotary.rotate_and_write(q, k, v, cos_sin, rotary_dim, rows[1], slots)
    close(got, expected)
    torch.testing.assert_close(rows[0], rows[1], rtol=ulps(dtype), atol=1e-6)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (rows[0].flatten(0, 1)[untouched] == 7).all() and (arenas[0][:, :between] == 7).all()


@pytest.mark.usefixtures("without_native")
def test_the_switch() -> None:
    assert load() is None
