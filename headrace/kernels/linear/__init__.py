"""The matrix product of a layer: the library's, or a kernel's for few rows, where it is faster."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu, support
from headrace.kernels.linear import cuda_invariant, cuda_rows, cuda_tall, cuda_wide, native
from headrace.kernels.linear.reference import linear_by_head_ref, linear_float32_ref, linear_ref
from headrace.kernels.lora import Factors, expand, expand_gated, shrink

if TYPE_CHECKING:
    from headrace.kernels.linear import triton as kernels
    from headrace.kernels.linear import triton_invariant as invariant_kernels
    from headrace.kernels.linear import triton_matmul as matmul_kernels
else:
    invariant_kernels = gpu.Late(f"{__name__}.triton_invariant")
    kernels = gpu.Late(f"{__name__}.triton")
    matmul_kernels = gpu.Late(f"{__name__}.triton_matmul")

FEW_ROWS: tuple[tuple[float, int], ...] = ((32 << 20, 16), (math.inf, 8))
"""Numbers of a weight, and up to how many rows the Triton kernel beats cuBLAS on weights of no more than that, on the GPUs
measured (see benchmarks/). The first line that a weight fits in counts."""
_MOST_FEW = max(rows for _, rows in FEW_ROWS)
_ALIGNED = 16
"""Numbers from row to row of a factor: of multiples of these the Triton kernel for several rows reads 16 bytes at once."""
_LT_OUTPUTS = 4224
"""Most outputs of a weight for which cuBLASLt chooses better kernels than cuBLAS, ..."""
_LT_ROWS: tuple[tuple[float, tuple[range, ...]], ...] = (
    (8192, (range(65, 513),)),
    (math.inf, (range(65, 113), range(177, 193))),
)
"""... by its largest number of channels: the rows for which they do, as measured on an H200 (see benchmarks/). The first line
that a weight fits in counts."""

warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental feature")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """``x W^T + bias``.

    Args:
        x: ``[..., in]``
        weight: ``[out, in]``
        bias: ``[out]``
        out_dtype: of the result; None: x's. The product is rounded once, to this, where the library supports it.
        batch_invariant: a row comes out bitwise the same in any batch; on a GPU, for a 2-dimensional x.
        exact: a float32 result of a 2-dimensional x is rounded to no other type. On a GPU it never is.
    """
    if batch_invariant and x.ndim == 2 and gpu.takes(x) and weight.dtype == x.dtype:
        y = cuda_invariant.linear(x, weight, bias, out_dtype)
        return matmul_kernels.matmul(x, weight, bias, out_dtype) if y is None else y
    if x.ndim == 2 and weight.dtype == x.dtype and gpu.takes(x):
        if (tiling := cuda_wide.choose(x, weight)) is not None:
            return cuda_wide.linear(x, weight, bias, out_dtype, tiling=tiling)
        if few_rows(x, weight):
            return kernels.linear(x, weight, bias, out_dtype=out_dtype)
        if bias is None and out_dtype in (None, x.dtype) and (rows := cuda_rows.choose(x, weight)) is not None:
            return cuda_rows.linear(x, weight, rows)
        if chosen_by_lt(len(x), weight):
            with cublaslt():
                return linear_ref(x, weight, bias, out_dtype)
    kind = out_dtype if exact else None
    if x.ndim == 2 and not batch_invariant and (y := native.few_rows(x, weight, bias, kind)) is not None:
        # As the library's product of more rows, one that need not be exact is rounded to x's type before it is widened.
        return y if out_dtype is None else y.to(out_dtype)
    if exact and out_dtype == torch.float32 and not x.is_cuda and x.itemsize < 4:
        return linear_float32_ref(x, weight, bias)
    return linear_ref(x, weight, bias, out_dtype)


def linear_gated(x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``x W^T``: ``[T, K] -> [T, N / 2]``; None where no kernel computes both faster."""
    if x.ndim != 2 or weight.dtype != x.dtype or not gpu.takes(x):
        return None
    if batch_invariant:
        return cuda_invariant.gated(x, weight)
    if (tiling := cuda_rows.choose(x, weight, gated=True)) is not None:
        return cuda_rows.linear(x, weight, tiling, gated=True)
    y = cuda_wide.gated(x, weight)
    return cuda_tall.gated(x, weight) if y is None else y


def chosen_by_lt(rows: int, weight: torch.Tensor) -> bool:
    """Whether cuBLASLt's choice for so many rows is faster than cuBLAS's."""
    outputs, inputs = weight.shape
    if outputs > _LT_OUTPUTS or weight.itemsize != 2 or weight.numel() < cuda_wide.MIN_NUMBERS:
        return False
    spans = next(spans for most, spans in _LT_ROWS if inputs <= most)
    return any(rows in span for span in spans) and support.is_hopper(weight.device)


@contextlib.contextmanager
def cublaslt() -> Iterator[None]:
    """Leaves the products within to cuBLASLt's choice of kernels. The setting is the process's."""
    library = torch.backends.cuda.preferred_blas_library
    before = library()
    library("cublaslt")
    try:
        yield
    finally:
        library(before)


def linear_adapted(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    factors: Factors,
    *,
    batch_invariant: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """``linear`` and the addition of adapters. The kernel of a single row multiplies by A too, and that of 2 to 64 rows adds
    all that adapters add before it rounds: neither makes a ``batch_invariant`` product."""
    if _is_single(x, weight) and not batch_invariant:
        y, low = kernels.linear_and_low(x, weight, bias, factors, out_dtype)
        expand(factors.added(low), y)
        return y
    if not batch_invariant and (whole := cuda_wide.adapted(x, weight, bias, out_dtype, factors)) is not None:
        return whole
    plain = bias is None and out_dtype in (None, x.dtype) and not batch_invariant
    if plain and (whole := cuda_tall.adapted(x, weight, factors)) is not None:
        return whole
    added = shrink(x, factors, batch_invariant=batch_invariant)
    y = linear(x, weight, bias, out_dtype, batch_invariant=batch_invariant, exact=exact)
    expand(added, y, batch_invariant=batch_invariant)
    return y


def linear_adapted_gated(
    x: torch.Tensor, weight: torch.Tensor, factors: Factors, *, batch_invariant: bool = False
) -> torch.Tensor | None:
    """``silu_mul`` of ``linear_adapted``, whose parts are gate and up; None: no kernel makes both."""
    if batch_invariant:
        return None
    if not _is_single(x, weight):
        y = cuda_wide.adapted_gated(x, weight, factors)
        return cuda_tall.adapted_gated(x, weight, factors) if y is None else y
    y, low = kernels.linear_and_low(x, weight, None, factors)
    return expand_gated(factors.added(low), y)


def _is_single(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel of a single row computes the product."""
    return x.ndim == 2 and len(x) == 1 and weight.dtype == x.dtype and gpu.takes(x) and few_rows(x, weight)


def linear_by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, batch_invariant: bool = False) -> None:
    """``out[t, h] = weight[h] x[t, h]``.

    Args:
        x: ``[T, heads, in]``, last axis contiguous.
        weight: ``[heads, out, in]``; one of the last two axes is contiguous.
        out: ``[T, heads, out]``, last axis contiguous; filled.
        batch_invariant: as for ``linear``.
    """
    if batch_invariant and gpu.takes(x) and weight.dtype == x.dtype:
        matmul_kernels.matmul_by_head(x, weight, out)
    elif gpu.takes(x):
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    else:
        linear_by_head_ref(x, weight, out)


def few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x ``[rows, in]`` has few enough rows for the Triton kernel, and factors that it reads fast."""
    rows = x.shape[0]
    if rows > _MOST_FEW:
        return False
    if rows > 1 and (x.itemsize > 2 or x.stride(0) % _ALIGNED or weight.stride(0) % _ALIGNED):
        return False
    numbers = weight.numel()
    return 0 < rows <= next((most for limit, most in FEW_ROWS if numbers <= limit), 0)
