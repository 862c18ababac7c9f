"""Batch-invariant attention of decode rows by the kernel in CUDA C++: bit for bit Triton's."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.attention import cuda_ordered
from headrace.kernels.attention.cuda_decode import PAGE, WIDTH
from headrace.kernels.attention.cuda_ordered import decode_attention, takes
from headrace.kernels.attention.reference import paged_attention as reference
from headrace.kernels.attention.tiling import Geometry, Tiling, batch_invariant_tiling, partial_size
from headrace.kernels.attention.triton import paged_attention
from headrace.kernels.cuda_launch import CudaKernel
from headrace.model_spec import AttentionSpec

from .test_cuda_decode import GPU, Rows

LENGTHS = (
    [1, 2, 16, 17, 63, 64, 65, 300, 0, 513, 255, 256, 257, 4096],
    [5000, 1, 2049, 4097, 12_300, 0, 8192],
    [31],
    [10_001],
    [200] * 40,
)


def tiling_of(kv_heads: int, group: int, lengths: list[int]) -> Tiling:
    geometry = Geometry(kv_heads, group, WIDTH, WIDTH, 2, 2, support.resources(torch.device("cuda")))
    return batch_invariant_tiling(geometry, max_seq_len=max(lengths) + 5000, split_tokens=4096)


def finished(rows: Rows) -> Rows:
    """Tokens' keys and values are in the cache, and q is finished."""
    q, cache = rows.unfinished.qkv, rows.expected()[1]
    return dataclasses.replace(rows, cache=cache, unfinished=rows.unfinished._replace(qkv=q))


def queries(rows: Rows) -> torch.Tensor:
    return rows.unfinished.qkv[:, : rows.num_heads * WIDTH].view(len(rows.lengths), rows.num_heads, WIDTH)


def attend(rows: Rows, tiling: Tiling, *, early: bool) -> torch.Tensor:
    q = queries(rows)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    workspace = torch.empty(partial_size(tiling, *q.shape), device=q.device)
    decode_attention(
        q, rows.cache, rows.tables, rows.lengths, out, workspace, scale=WIDTH**-0.5, splits=tiling.splits,
        split_tokens=tiling.split_tokens, early=early,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("group", [1, 4, 8])
def test_kernels_compile(group: int, nvrtc: None) -> None:
    for stages in (8, 12):
        assert cuda_ordered._kernel.__wrapped__(group, stages).binary().startswith(b"\x7fELF")


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_ordered, "tensor_map", lambda x, *tile, promotion: (tuple(x.shape), x.stride(), tile, promotion))
    monkeypatch.setattr(support, "resources", lambda device: support.Resources(132, 227 << 10))
    rows = Rows.make([40, 0, 7], 2, 4, device="cpu")
    attend(rows, Tiling(16, 4, 64, 9, 4096, 4, 3), early=True)
    ((kernel, grid, cache, *given),) = launches
    assert grid == (2, 3, 9) and cache == ((6, 2, 4, PAGE, 64), ((PAGE + 2) * 512, 256, 64, 512, 1), (4, PAGE, 64), 128)
    assert given[-5:] == [rows.tables.shape[1], 12 * WIDTH, 9, 256, 1]
    assert given[-6] == torch.tensor(WIDTH**-0.5).mul(math.log2(math.e)).item()
    assert isinstance(kernel, CudaKernel) and kernel._macros == {"GROUP": 4, "STAGES": 12}


def test_which_layers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ordered, "refusals", lambda device: ())
    rows = Rows.make([5], 2, 4, device="cpu")
    q = queries(rows)
    spec = AttentionSpec(layer=0, num_heads=8, num_kv_heads=2, head_dim=WIDTH, v_head_dim=WIDTH, scale=WIDTH**-0.5)
    assert takes(1, spec, rows.cache, q, None) and not takes(1 << 16, spec, rows.cache, q, None)
    assert not takes(1, dataclasses.replace(spec, window=128), rows.cache, q, None)
    assert not takes(1, dataclasses.replace(spec, soft_cap=30.0), rows.cache, q, None)
    assert not takes(1, spec, rows.cache, q, torch.zeros(8))
    assert not takes(1, spec, rows.cache[:, :8], q, None) and not takes(1, spec, rows.cache[..., :192], q, None)
    assert not takes(1, spec, rows.cache.half(), q.half(), None) and not takes(1, spec, rows.cache.half(), q, None)
    monkeypatch.setattr(cuda_ordered, "refusals", lambda device: ("it is no Hopper",))
    assert not takes(1, spec, rows.cache, q, None)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (2, 8), (4, 1), (2, 5)])
def test_bits_are_those_of_the_other_kernel(kv_heads: int, group: int, lengths: list[int]) -> None:
    """Memory behind a row's last token holds NaN. Repeated launches leave the counters at zero."""
    rows, tiling = finished(Rows.make(lengths, kv_heads, group)), tiling_of(kv_heads, group, lengths)
    q = queries(rows)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=q.device)
    keys, values = rows.cache[..., :WIDTH], rows.cache[..., WIDTH:]
    wanted = paged_attention(
        q, keys, values, rows.tables, starts, rows.lengths, scale=WIDTH**-0.5, tiling=tiling, tokens=range(len(lengths))
    )
    wanted[rows.lengths == 0] = 0
    for early in (False, True, False):
        assert torch.equal(attend(rows, tiling, early=early), wanted)
    exact = reference(q.double(), keys, values, rows.tables, starts.cpu(), rows.lengths, scale=WIDTH**-0.5)
    torch.testing.assert_close(wanted.double(), exact.double(), atol=2e-2, rtol=2e-2)
