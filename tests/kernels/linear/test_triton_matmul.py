"""Products against torch's, and rows against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as ref

from headrace.kernels.linear.triton_matmul import matmul, matmul_by_head

SHAPES = [(1, 64, 64), (5, 100, 7), (65, 72, 130), (130, 33, 64), (3, 3, 1), (600, 16, 70)]
"""(rows, in, out)"""


def operands(rows: int, size_in: int, size_out: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [
        t.to(dtype) for t in (torch.randn(rows, size_in), torch.randn(size_out, size_in) * size_in**-0.5, torch.randn(size_out))
    ]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], biased: bool, device: torch.device) -> None:
    x, weight, bias = operands(*shape)
    got = matmul(x.to(device), weight.to(device), bias.to(device) if biased else None)
    torch.testing.assert_close(got.cpu(), ref(x, weight, bias if biased else None), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = (t.to(device) for t in operands(200, 96, 80, dtype))
    whole = matmul(x, weight, bias)
    for first, end in ((0, 1), (1, 3), (60, 70), (7, 200), (199, 200)):
        assert torch.equal(matmul(x[first:end].contiguous(), weight, bias), whole[first:end])
    order = torch.randperm(200, device=device)
    assert torch.equal(matmul(x[order], weight, bias), whole[order])


def test_a_result_in_float32(device: torch.device) -> None:
    x, weight, _ = operands(9, 40, 12, torch.float16)
    got = matmul(x.to(device), weight.to(device), out_dtype=torch.float32)
    torch.testing.assert_close(got.cpu(), ref(x.float(), weight.float()), atol=1e-5, rtol=1e-5)


def test_parts_of_wider_tensors(device: torch.device) -> None:
    """Numbers beside x or the weight are not read."""
    x, weight, _ = operands(6, 40, 12)
    wide = [torch.full((len(t), t.shape[1] + 10), torch.nan).to(device) for t in (x, weight)]
    for target, source in zip(wide, (x, weight), strict=True):
        target[:, 5:-5] = source.to(device)
    got = matmul(wide[0][:, 5:-5], wide[1][:, 5:-5])
    torch.testing.assert_close(got.cpu(), ref(x, weight), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_apart(shape: tuple[int, int, int], turned: bool, device: torch.device) -> None:
    """Heads of wider tensors on both sides; what is beside them is neither read nor written."""
    rows, size_in, size_out = shape
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 3, size_in), torch.randn(3, size_out, size_in) * size_in**-0.5
    wide = torch.full((rows, 3, size_in + 4), torch.nan).to(device)
    wide[..., 4:] = x.to(device)
    out = torch.full((rows, 3, size_out + 5), 7.0).to(device)
    factor = weight.to(device).transpose(1, 2).contiguous().transpose(1, 2) if turned else weight.to(device)
    matmul_by_head(wide[..., 4:], factor, out[..., 2:-3])
    torch.testing.assert_close(out[..., 2:-3].cpu(), torch.einsum("thi,hoi->tho", x, weight), atol=2e-5, rtol=2e-5)
    assert bool((out[..., :2] == 7).all()) and bool((out[..., -3:] == 7).all())


def test_heads_that_do_not_fit(device: torch.device) -> None:
    x, weight, out = (torch.zeros(shape).to(device) for shape in ((2, 3, 8), (3, 5, 8), (2, 3, 5)))
    with pytest.raises(ValueError, match="do not fit"):
        matmul_by_head(x, weight[:2], out)
    with pytest.raises(ValueError, match="do not fit"):
        matmul_by_head(x, weight, out[..., :4])
    with pytest.raises(ValueError, match="contiguous"):
        matmul_by_head(x, torch.zeros(3, 10, 16).to(device)[:, ::2, ::2], out)


def test_what_does_not_fit(device: torch.device) -> None:
    x, weight, _ = (t.to(device) for t in operands(2, 8, 5))
    with pytest.raises(ValueError, match="does not fit"):
        matmul(x, weight[:, 1:])
    with pytest.raises(ValueError, match="does not fit"):
        matmul(x, weight.half())
    with pytest.raises(ValueError, match="contiguous"):
        matmul(x.T.contiguous().T, weight)


def test_nothing_to_do(device: torch.device) -> None:
    assert matmul(torch.empty(0, 8, device=device), torch.empty(5, 8, device=device)).shape == (0, 5)
