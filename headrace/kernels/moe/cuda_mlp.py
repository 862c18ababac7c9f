"""Both products of experts in 16 bits of some tokens in one launch, on Hopper GPUs: the kernel of ``mlp.cu``. Reference:
``headrace.kernels.moe.reference.moe_mlp``.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.moe.triton_sort import Routing
from headrace.model_spec import MoeSpec

_SOURCE = Path(__file__).with_name("mlp.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
_LINE, _BOX, _THREADS, _QUEUE, _GROUPS = 128, 64, 320, 8, 2
"""Bytes of a line of shared memory, lines of a box that is loaded at once, and a block's threads, units and groups."""
_CELLS, _MOST_TILES = 64, 4096 - 64


@dataclasses.dataclass(frozen=True)
class MlpSizes:
    """Sizes of a block."""

    kilobytes: int
    """Shared memory, at most; it settles how many slots are in flight."""
    lines: int = 2
    """1 or 2: lines of 128 bytes a slot of each of 128 lines of weights."""
    down_lines: int = 64
    """Lines of a unit of the second product: 64 or 128."""
    foresee: bool = True

    def stages(self, rows: int) -> int:
        """Slots in flight."""
        return ((self.kilobytes << 10) - self._fixed(rows)) // (self._slot(rows) + 24)

    def shared(self, rows: int) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed(rows) + self.stages(rows) * (self._slot(rows) + 24)

    def _slot(self, rows: int) -> int:
        deep = 2 * _BOX * self.lines // self.down_lines
        return (2 * self.lines * _BOX + max(self.lines, deep) * rows) * _LINE

    def _fixed(self, rows: int) -> int:
        return 1024 + _GROUPS * rows * 2 * (self.down_lines + 8) + 8 * (2 * _QUEUE + _GROUPS)


def choose_sizes(rows: int) -> MlpSizes | None:
    """The sizes for tiles of so many rows. None: the kernel has none."""
    return {16: MlpSizes(220), 32: MlpSizes(220, 2, 128), 64: MlpSizes(220, 2, 128)}.get(rows)


def takes(
    x: torch.Tensor, first: object, second: object, spec: MoeSpec, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the matrices if the kernel multiplies the tokens x by them."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or routing.table is None:
        return None
    whole = not (x.shape[1] % 128 or spec.intermediate_size % _BOX) and support.in_pieces(x)
    whole = whole and first.is_contiguous() and second.is_contiguous() and not (first.data_ptr() | second.data_ptr()) & 15
    silu = spec.gated and spec.act in ("silu", "swish")
    fits = whole and silu and x.dtype == first.dtype == second.dtype and x.dtype in _KINDS
    fits = fits and choose_sizes(routing.table_tokens) is not None and routing.tiles(routing.table_tokens) <= _MOST_TILES
    return (first, second) if fits and not refusals(x.device) else None


def products(
    x: torch.Tensor, routing: Routing, first: torch.Tensor, second: torch.Tensor, factors: torch.Tensor, top_k: int,
    sizes: MlpSizes | None = None
) -> torch.Tensor:  # fmt: skip
    """The output of each choice times its factor, ``[choices, hidden]``.

    Args:
        x: ``[T, hidden]``
        factors: ``[T, top_k]`` float32
    """
    rows, (count, hidden, inner) = routing.table_tokens, second.shape
    sizes = sizes or choose_sizes(rows)
    if sizes is None or routing.table is None:
        raise ValueError(f"no sizes for tiles of {rows} rows")
    middle = torch.empty(routing.choices, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(routing.choices, hidden, dtype=x.dtype, device=x.device)
    columns = _LINE // x.itemsize
    weights = (tensor_map(held.view(-1, held.shape[2]), _BOX, columns) for held in (first, second))
    tensors = routing.table, routing.order, factors, middle, y, _cells(x.device)
    blocks = support.resources(x.device).multiprocessors
    _kernel(sizes, rows, x.dtype, top_k, count, hidden, inner, blocks).launch(
        (blocks, 1, 1), *weights, tensor_map(x, 1, columns), tensor_map(middle, 8, columns),
        *(tensor.data_ptr() for tensor in tensors), routing.tiles(rows),
    )  # fmt: skip
    return y


def _cells(device: torch.device) -> torch.Tensor:
    """Counters of the kernel's blocks: 0 between launches. Each stream has its own, and so have graphs, which are replayed one
    after the other: theirs exist before the first is captured, as kernels run once before."""
    captured = _cells_of(device, None)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return captured
    return _cells_of(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _cells_of(device: torch.device, stream: int | None) -> torch.Tensor:
    return torch.zeros(_CELLS + _MOST_TILES, dtype=torch.int32, device=device)


@functools.cache
def _kernel(
    sizes: MlpSizes, rows: int, kind: torch.dtype, top_k: int, experts: int, hidden: int, inner: int, blocks: int
) -> CudaKernel:
    macros = {"KIND": _KINDS[kind], "ROWS": rows, "LINES": sizes.lines, "DOWN_LINES": sizes.down_lines}
    macros |= {"STAGES": sizes.stages(rows), "TOP_K": top_k, "EXPERTS": experts, "HIDDEN": hidden, "INNER": inner}
    macros |= {"BLOCKS": blocks, "FORESEE": int(sizes.foresee)}
    return CudaKernel(_SOURCE, "expert_mlp", "MMMMPPPPPPi", macros, _THREADS, sizes.shared(rows))
