"""Long prompts by cuDNN's attention, over copies of keys and values.

cuDNN compiles a kernel for each combination of sizes, so that sizes are rounded up: lengths that the device reads say which
part of them is there. A thread does that; until it is done, and for rows of few queries, headrace's Triton kernel attends.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.attention.compiled import Buildable, CompiledBackend, Launch, compiling, dtype_refusals
from headrace.attention.paged_rows import PagedRows, most_copied
from headrace.attention.triton import TritonAttention
from headrace.kernels import support
from headrace.kernels.transfer import upload
from headrace.model_spec import AttentionSpec

WIDTH = 256
"""Width of the heads for which it is preferred: with 16 and 4 heads, 2 prompts of 8,192 tokens take it 676 TFLOP/s, and
headrace's kernel 475 (H200)."""
_FEWEST_QUERIES, _FEWEST_KEYS = 1024, 16_384
"""Bounds of a row's queries are powers of four from the one on, and that of its keys is a power of two, no less than the other,
which all steps share: the first step of each size is slower, since its kernel is being built."""
_building = threading.Lock()
_Q, _K, _V, _OUT, _Q_LENS, _K_LENS, _Q_STARTS, _K_STARTS, _V_STARTS, _OUT_STARTS = range(1, 11)


@dataclasses.dataclass(frozen=True)
class CudnnKernel:
    """Causal attention of at most ``rows`` rows, each of at most ``queries`` queries that are the last of at most ``keys``."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rows: int
    queries: int
    keys: int
    q_strides: tuple[int, int]
    """From token to token, and from head to head."""
    variant: str = "cuDNN"

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, int, int],
        q_strides: tuple[int, int],
    ) -> Self:
        """``sizes``: the bounds ``rows``, ``queries`` and ``keys``."""
        heads, widths = (spec.num_heads, spec.num_kv_heads), (spec.head_dim, spec.v_head_dim)
        return cls(device, dtype, *heads, *widths, spec.scale, *sizes, q_strides)

    def build(self) -> None:
        with _building, torch.cuda.device(self.device):
            _graph(self)


@functools.cache
def _graph(kernel: CudnnKernel) -> Any:
    import cudnn

    kind = cudnn.data_type.BFLOAT16 if kernel.dtype == torch.bfloat16 else cudnn.data_type.HALF
    integers, real = cudnn.data_type.INT32, cudnn.data_type.FLOAT
    rows, heads, kv_heads = kernel.rows, kernel.num_heads, kernel.num_kv_heads
    width = kernel.head_dim + kernel.v_head_dim
    graph = cudnn.pygraph(
        handle=_handle(kernel.device, "build"), io_data_type=kind, intermediate_data_type=real, compute_data_type=real
    )

    def numbers(uid: int, count: int) -> Any:
        return graph.tensor(dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=integers, uid=uid, name=f"numbers {uid}")

    def packed(uid: int, heads: int, tokens: int, width: int, strides: tuple[int, int], starts: int) -> Any:
        """Rows one behind another; the tensor ``starts`` says where each begins, in numbers."""
        token, head = strides
        dim, stride = (rows, heads, tokens, width), (tokens * token, head, token, 1)
        return graph.tensor(
            dim=dim, stride=stride, data_type=kind, uid=uid, ragged_offset=numbers(starts, rows + 1), name=f"rows {uid}"
        )

    of_keys = kv_heads * width, width
    out, _ = graph.sdpa(
        name="attention",
        q=packed(_Q, heads, kernel.queries, kernel.head_dim, kernel.q_strides, _Q_STARTS),
        k=packed(_K, kv_heads, kernel.keys, kernel.head_dim, of_keys, _K_STARTS),
        v=packed(_V, kv_heads, kernel.keys, kernel.v_head_dim, of_keys, _V_STARTS),
        seq_len_q=numbers(_Q_LENS, rows),
        seq_len_kv=numbers(_K_LENS, rows),
        use_padding_mask=True,
        attn_scale=kernel.scale,
        generate_stats=False,
        use_causal_mask_bottom_right=True,
        compute_data_type=real,
    )
    token = heads * kernel.v_head_dim
    out.set_uid(_OUT).set_output(True).set_data_type(kind).set_dim([rows, heads, kernel.queries, kernel.v_head_dim])
    out.set_stride([kernel.queries * token, kernel.v_head_dim, token, 1])
    out.set_ragged_offset(numbers(_OUT_STARTS, rows + 1))
    graph.build([cudnn.heur_mode.A])
    return graph


@functools.cache
def _handle(device: torch.device, use: str) -> Any:
    """A handle for building, which one thread does at a time, and one for launching."""
    import cudnn

    return cudnn.create_handle()


class CudnnPrefill(CompiledBackend):
    """Prefill rows of heads that FlashInfer's kernels for Hopper GPUs have no good tiles for."""

    name = "cudnn"
    kinds = frozenset()
    has_scales = False
    eager_bytes = 16 << 20

    def __init__(self, scratch: Any = None) -> None:
        super().__init__(scratch)
        self._launches: dict[tuple[object, ...], Launch | None] = {}
        """Launches of this step, by all that they depend on of a layer."""

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype)
        if importlib.util.find_spec("cudnn") is None and not support.planned():
            reasons.append("cuDNN's frontend is not installed: pip install 'headrace[cuda]'")
        if support.compute_capability(device) != support.HOPPER_SM:
            reasons.append("it is for Hopper GPUs")
        reasons += dtype_refusals(dtype)
        if (spec.head_dim, spec.v_head_dim) != (WIDTH, WIDTH):
            reasons.append(f"it is for heads {WIDTH} wide, not {spec.head_dim} and {spec.v_head_dim}")
        return reasons

    @classmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Sequence[Buildable]:
        """A single prompt's: the first of all takes seconds, most of them to import the library."""
        if device.type == "cuda" and device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        strides = spec.num_heads * spec.head_dim, spec.head_dim
        return [CudnnKernel.of(spec, dtype, device, (1, _FEWEST_QUERIES, _FEWEST_KEYS), strides)]

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._launches.clear()

    def _launch(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        spec = cache.spec
        kind = (cache.group, spec.num_heads, spec.num_kv_heads, spec.scale, q.dtype, q.stride())
        if kind not in self._launches:
            self._launches[kind] = self._choose(step, cache, q)
        return self._launches[kind]

    def _choose(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        rows, spec = PagedRows(step, cache.block_size), cache.spec
        if not rows.are_long(cache, q.dtype):
            return None
        queries = max(_FEWEST_QUERIES, 4 ** -(-(rows.most_queries - 1).bit_length() // 2))
        longest = max(int(rows.lengths.max()), min(step.longest, most_copied(spec, q.dtype)))
        keys = max(_FEWEST_KEYS, support.power_of_two(longest))
        sizes = support.power_of_two(rows.num_rows), queries, keys
        kernel = CudnnKernel.of(spec, q.dtype, q.device, sizes, (q.stride(0), q.stride(1)))
        if not compiling(kernel).ready:
            return None
        graph, width = _graph(kernel), spec.head_dim
        numbers = _row_numbers(rows, kernel, cache.block_size)

        def launch(q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
            import cudnn

            copies = rows.copied_pages(cache)
            tensors = {_Q: q, _K: copies[..., :width], _V: copies[..., width:], _OUT: out} | numbers
            handle = _handle(q.device, "launch")
            cudnn.set_stream(handle, torch.cuda.current_stream(q.device).cuda_stream)
            space = self._space(q.device, max(graph.get_workspace_size(), self.eager_bytes))
            graph.execute(tensors, space, handle=handle)

        return launch


def _row_numbers(rows: PagedRows, kernel: CudnnKernel, block_size: int) -> dict[int, torch.Tensor]:
    """The rows' lengths, and where each begins in q, keys, values and output, in numbers; rows that are not there are empty."""
    missing = (0, kernel.rows - rows.num_rows)
    query_start, page_start = (np.pad(each.numpy(), missing, mode="edge") for each in (rows.query_start, rows.page_start))
    parts = {
        _Q_LENS: np.diff(query_start),
        _K_LENS: np.pad(rows.lengths, missing),
        _Q_STARTS: query_start * kernel.q_strides[0],
        _K_STARTS: page_start * (block_size * kernel.num_kv_heads * (kernel.head_dim + kernel.v_head_dim)),
        _OUT_STARTS: query_start * (kernel.num_heads * kernel.v_head_dim),
    }
    together = upload(np.concatenate(list(parts.values())).astype(np.int32), kernel.device)
    ends = np.cumsum([len(part) for part in parts.values()])
    found = {uid: together[end - len(part) : end] for (uid, part), end in zip(parts.items(), ends.tolist(), strict=True)}
    return found | {_V_STARTS: found[_K_STARTS]}
