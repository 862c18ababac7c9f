"""The interpreter's ``tl.dot``: bits of a row do not depend on numpy's BLAS, or bit-equality of kernels could not be tested."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from support.interpreter import blas_dot, product
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from .operations import Maker, operations
from .test_triton_invariance import check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: kernels are compiled")


def moody_matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """A legal BLAS at its worst: the order of a row's terms depends on the row's place and on the number of rows."""
    rows, count = a.shape
    terms = (a[:, :, None] * b[None]).astype(dtype or a.dtype)  # [M, K, N]
    order = (np.arange(count) + np.arange(rows)[:, None] * 5 + rows) % count
    return np.add.accumulate(np.take_along_axis(terms, order[:, :, None], axis=1), axis=1)[:, -1]


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", moody_matmul)


def factors(dtype: type, *, rows: int = 20, inner: int = 37, columns: int = 24) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((rows, inner)).astype(dtype), random.standard_normal((inner, columns)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_and_columns_of_a_product(dtype: type, moody: None) -> None:
    a, b = factors(dtype)
    assert not np.array_equal(np.matmul(a, b)[3:9], np.matmul(a[3:9], b)), "moody_matmul is too tame"
    whole = product(a, b)
    assert whole.dtype == dtype
    for first, end in ((0, 1), (3, 9), (19, 20), (0, 20)):
        assert np.array_equal(product(a[first:end], b), whole[first:end])
        assert np.array_equal(product(a, b[:, first:end]), whole[:, first:end])
        assert np.array_equal(product(np.asfortranarray(a[first:end]), np.asfortranarray(b)), whole[first:end])
    assert np.array_equal(product(b.T, a.T).T, whole)
    assert np.array_equal(product(np.stack([a, -a]), np.stack([b, b])), np.stack([whole, -whole]))


@pytest.mark.parametrize("inner", [1, 2, 7, 8, 9, 16, 64, 128])
def test_values_of_a_product(inner: int) -> None:
    a, b = factors(np.float64, inner=inner)
    np.testing.assert_allclose(product(a, b), a @ b, atol=1e-12)
    whole = [np.rint(each * 9).astype(np.int32) for each in (a, b)]
    assert np.array_equal(product(*whole), whole[0] @ whole[1])


def dot(a: torch.Tensor, b: torch.Tensor, kind: tl.dtype, sums: np.ndarray) -> np.ndarray:
    """``tl.dot`` of tensors that numpy may not know the types of."""
    bits = torch.uint8 if a.element_size() == 1 else torch.uint16
    left, right = (TensorHandle(each.view(bits).numpy(), kind) for each in (a, b))
    return InterpreterBuilder.create_dot(None, left, right, TensorHandle(sums, tl.float32), None, None).data


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, tl.bfloat16), (torch.float8_e4m3fn, tl.float8e4nv), (torch.float8_e5m2, tl.float8e5)],
    ids=str,
)
def test_types_that_numpy_does_not_know(dtype: torch.dtype, kind: tl.dtype) -> None:
    a, b = (torch.from_numpy(each).to(dtype) for each in factors(np.float32))
    sums = np.full((20, 24), 0.5, np.float32)
    expected = a.float().numpy() @ b.float().numpy() + 0.5
    np.testing.assert_allclose(dot(a, b, kind, sums), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["product of odd sizes", "product by head"])
def test_kernels_do_not_depend_on_a_moody_blas(name: str, moody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would, if the interpreter called it."""
    operation = dict(operations(Maker(torch.float32, torch.device("cpu"))))[name]()
    check(operation, (1, 17), 20)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", blas_dot)
    with pytest.raises(AssertionError, match="differ by"):
        check(operation, (1, 17), 20)
