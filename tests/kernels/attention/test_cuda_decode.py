"""Attention of decode rows by the kernel in CUDA C++, which finishes q and k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.attention import cuda_decode
from headrace.kernels.attention.cuda_decode import PAGE, WIDTH, DecodeTiling, choose_tiling, decode_attention, takes
from headrace.kernels.attention.reference import paged_attention
from headrace.kernels.attention.unfinished import Unfinished
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.qkv.reference import norm_rotate_and_cache
from headrace.model_spec import AttentionSpec

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16
TILINGS = [
    DecodeTiling(4, 3, 1),
    DecodeTiling(1, 6, 2, 2),
    DecodeTiling(4, 3, 8),
    DecodeTiling(8, 3, 4, 2),
    DecodeTiling(4, 3, 16, 2, gathers=True),
]
LENGTHS = ([1, 2, 16, 17, 33, 300, 0, 513], [5000, 1, 2049], [31])


@dataclasses.dataclass
class Rows:
    """Decode rows with pages in any order; what stands behind a row's last token is no number."""

    unfinished: Unfinished
    cache: torch.Tensor
    """``[pages, PAGE, kv_heads, 2 * WIDTH]``"""
    tables: torch.Tensor
    lengths: torch.Tensor
    num_heads: int

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        kv_heads: int,
        group: int,
        *,
        dtype: torch.dtype = BF16,
        bare: bool = False,
        device: str = "cuda",
    ) -> Rows:
        torch.manual_seed(len(lengths) + group)
        counts = [max(1, math.ceil(length / PAGE)) for length in lengths]
        pages = iter(torch.randperm(sum(counts)).add(1).tolist())
        tables = torch.zeros(len(lengths), max(counts) + 3, dtype=torch.int32)
        # A page has more than this layer's heads.
        cache = torch.randn(sum(counts) + 1, PAGE + 2, kv_heads, 2 * WIDTH).to(dtype)[:, :PAGE]
        slots = torch.full((len(lengths),), -1)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tables[row, :count] = torch.tensor([next(pages) for _ in range(count)])
            if length:
                page, place = int(tables[row, (length - 1) // PAGE]), (length - 1) % PAGE
                slots[row] = page * PAGE + place
                cache[page, place:] = torch.nan
        angles = torch.rand(len(lengths), WIDTH // 2) * 6
        qkv = torch.randn(len(lengths), (group + 2) * kv_heads * WIDTH).to(dtype)
        weights = [(1 + torch.randn(WIDTH) / 4).to(dtype) for _ in range(2)]
        cos_sin = None if bare else torch.cat((angles.cos(), angles.sin()), 1).to(device)
        q_weight, k_weight = (None if bare else weight.to(device) for weight in weights)
        unfinished = Unfinished(
            qkv.to(device), slots.to(device), cos_sin, 0 if bare else WIDTH, q_weight, k_weight, 1e-6, False
        )
        counted = torch.tensor(lengths, dtype=torch.int32)
        return cls(unfinished, cache.to(device), tables.to(device), counted.to(device), group * kv_heads)

    def attend(self, tiling: DecodeTiling, early: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the cache then."""
        cache = self.cache.new_empty(self.cache.shape[0], PAGE + 2, *self.cache.shape[2:])[:, :PAGE]
        cache.copy_(self.cache)
        out = self.unfinished.qkv.new_empty(len(self.lengths), self.num_heads, WIDTH)
        decode_attention(self.unfinished, cache, self.tables, self.lengths, out, scale=WIDTH**-0.5, tiling=tiling, early=early)
        return out, cache

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's, in float64 behind the finished q and k."""
        cache, (qkv, slots, cos_sin, rotary_dim, q_weight, k_weight, eps, *_) = self.cache.clone(), self.unfinished
        keys, values = cache[..., :WIDTH], cache[..., WIDTH:]
        q = norm_rotate_and_cache(
            qkv, self.num_heads, keys, values, slots, cos_sin=cos_sin, rotary_dim=rotary_dim, q_weight=q_weight,
            k_weight=k_weight, eps=eps, q_out=qkv.new_empty(len(qkv), self.num_heads, WIDTH),
        )  # fmt: skip
        starts = torch.arange(len(qkv) + 1, dtype=torch.int32)
        return paged_attention(q.double(), keys, values, self.tables, starts, self.lengths, scale=WIDTH**-0.5), cache


@pytest.mark.parametrize("bare", [False, True])
def test_kernels_compile(bare: bool, nvrtc: None) -> None:
    for tiling, group, dtype in zip(TILINGS, (4, 8, 1, 5, 4), (BF16, torch.float16) * 3, strict=False):
        assert cuda_decode._kernel.__wrapped__(tiling, group, dtype, not bare, not bare).binary().startswith(b"\x7fELF")


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_decode, "tensor_map", lambda x, *tile, promotion: (tuple(x.shape), x.stride(), tile, promotion))
    rows = Rows.make([40, 0, 7], 2, 4, device="cpu")
    rows.attend(DecodeTiling(4, 3, 4), early=True)
    ((kernel, grid, cache, *given),) = launches
    assert grid == (8, 3, 1) and cache == ((6, 2, 4, PAGE, 64), ((PAGE + 2) * 512, 256, 64, 512, 1), (4, PAGE, 64), 128)
    assert given[-10:] == [rows.tables.shape[1], 12 * WIDTH, WIDTH, 2, (PAGE + 2) * 512, 512, 256, 1, 0, 0]
    assert isinstance(kernel, CudaKernel) and kernel._macros == {
        "KIND": 0, "GROUP": 4, "WARPS": 4, "STAGES": 3, "SPLIT": 4, "LEAST": 1, "NORMS": 1, "ROTATES": 1,
        "GATHERS": 0,
    }  # fmt: skip


def test_which_layers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decode, "refusals", lambda device: ())
    rows, spec = (
        Rows.make([5], 2, 4, device="cpu"),
        AttentionSpec(
            layer=0, num_heads=8, num_kv_heads=2, head_dim=WIDTH, v_head_dim=WIDTH, scale=WIDTH**-0.5, rotary_dim=WIDTH
        ),
    )
    given = rows.unfinished
    assert takes(2, spec, rows.cache, given, None) and not takes(1, spec, rows.cache, given, None)
    assert takes(1, spec, rows.cache, given._replace(streamed=True), None)
    assert takes(2, spec, rows.cache, given._replace(q_weight=None, k_weight=None), None)
    assert takes(2, spec, rows.cache, given._replace(cos_sin=None, rotary_dim=0), None)
    assert not takes(2, dataclasses.replace(spec, window=128), rows.cache, given, None)
    assert not takes(2, dataclasses.replace(spec, soft_cap=30.0), rows.cache, given, None)
    assert not takes(2, spec, rows.cache, given, torch.zeros(8))
    assert not takes(2, spec, rows.cache, given._replace(offset=True), None)
    assert not takes(2, spec, rows.cache, given._replace(rotary_dim=64), None)
    assert not takes(2, spec, rows.cache, given._replace(q_weight=None), None)
    assert not takes(2, spec, rows.cache[:, :8], given, None) and not takes(2, spec, rows.cache.half(), given, None)
    assert not takes(2, spec, rows.cache[..., :192], given, None)
    monkeypatch.setattr(cuda_decode, "refusals", lambda device: ("it is no Hopper",))
    assert not takes(2, spec, rows.cache, given, None)


def test_tilings_that_were_fastest() -> None:
    """Those of 8 KV heads on an H200. No block asks for more than the 227 KB that it may have."""
    found = {rows: choose_tiling(rows * 8, 132) for rows in (1, 2, 4, 8, 16, 32, 64, 256)}
    assert found == {
        1: DecodeTiling(8, 3, 8, 3, True),
        2: DecodeTiling(8, 3, 4, 2), 4: DecodeTiling(8, 3, 4, 2), 8: DecodeTiling(8, 3, 2), 16: DecodeTiling(4, 3, 2),
        32: DecodeTiling(4, 3, 1), 64: DecodeTiling(4, 3, 1), 256: DecodeTiling(4, 3, 1),
    }  # fmt: skip
    every = {*TILINGS, *(choose_tiling(programs, 132) for programs in range(1, 600))}
    assert all(tiling.shared(cuda_decode.MAX_GROUP) <= 227 << 10 for tiling in every)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (2, 8), (4, 1), (2, 5)])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_rows(lengths: list[int], kv_heads: int, group: int, tiling: DecodeTiling) -> None:
    """Full pages and one token; padding rows of a graph; keys and values that are written, and nothing else."""
    for dtype, bare in ((BF16, False), (torch.float16, True)):
        rows = Rows.make(lengths, kv_heads, group, dtype=dtype, bare=bare)
        expected, cache = rows.expected()
        for early in (False, True):
            out, written = rows.attend(tiling, early)
            torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(written, cache, atol=2e-2, rtol=1e-2, equal_nan=True)
            assert torch.equal(rows.attend(tiling, early)[0], out)
    assert not support.counters("decode", torch.device("cuda:0")).any()
