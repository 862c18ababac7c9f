"""Both products of experts in 16 bits of some tokens in one launch, on Hopper GPUs: the kernel of ``mlp.cu``. Reference:
``headrace.kernels.moe.reference.moe_mlp``.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TypeGuard

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.tiling import most_tiles
from headrace.model_spec import MoeSpec

Held = torch.Tensor | ExpertCodes
_SOURCE = Path(__file__).with_name("mlp.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
_LINE, _BOX, _THREADS, _QUEUE, _GROUPS, _SORTERS = 128, 64, 320, 8, 2, 8
"""Bytes of a line of shared memory, lines of a box that is loaded at once, and a block's threads, places of its queue of units,
groups of warps that multiply, and warps that sort."""
_PROMOTION = 128
"""Bytes that the L2 cache fetches of a line: with 256, an H200's memory is 3 to 10 % slower here."""
_MAX_EXPERTS = 256
_FEW_TOKENS = 32
"""Tokens up to which the kernels of Triton stay: the kernels behind them start while they run, for which this one leaves no
room."""


@dataclasses.dataclass(frozen=True)
class MlpSizes:
    """Sizes of a block."""

    rows: int
    """Rows of a tile: 16 or 32."""
    kilobytes: int
    """Shared memory, at most; it settles how many slots are in flight."""
    lines: int = 2
    """1 or 2: lines of 128 bytes a slot of each of 128 lines of weights."""
    down_lines: int = 64
    """Lines of a unit of the second product: 64 or 128."""
    resident: int = 1
    """Blocks that a multiprocessor has at a time."""

    def choices(self, experts: int) -> int:
        """The most choices."""
        return self.rows * experts // 2

    def stages(self, experts: int) -> int:
        """Slots in flight."""
        return ((self.kilobytes << 10) - self._fixed(experts)) // (self._slot + 24)

    def shared(self, experts: int) -> int:
        """Bytes of dynamic shared memory of a block."""
        return 1024 + _GROUPS * self._results + 8 * (2 * _QUEUE + _GROUPS) + self.stages(experts) * (self._slot + 24)

    @property
    def _slot(self) -> int:
        deep = 2 * _BOX * self.lines // self.down_lines
        return (2 * self.lines * _BOX + max(self.lines, deep) * self.rows) * _LINE

    @property
    def _results(self) -> int:
        return self.rows * 2 * (self.down_lines + 8)

    def _fixed(self, experts: int) -> int:
        choices = self.choices(experts)
        sort = 4 * _SORTERS * experts + 12 * (experts + choices // self.rows) + 2 * choices + 4 * experts + 256
        return 1024 + _GROUPS * self._results + 8 * (2 * _QUEUE + _GROUPS) + sort


_SIZES = MlpSizes(16, 226), MlpSizes(32, 113, 1, 128, 2)
"""The fastest of those measured on an H200 with the experts of Qwen3-30B-A3B."""
_COUNTERS = 64 + max(most_tiles(sizes.choices(_MAX_EXPERTS), _MAX_EXPERTS, sizes.rows) for sizes in _SIZES)
"""Counters of a launch: the units that are taken, and at a distance the rows of each tile that are complete."""


def choose_sizes(choices: int, experts: int) -> MlpSizes | None:
    """The sizes for so many choices. None: other kernels are faster."""
    return next((sizes for sizes in _SIZES if choices <= sizes.choices(experts)), None)


def taken(
    x: torch.Tensor, experts: torch.Tensor, factors: torch.Tensor, first: Held, second: Held, spec: MoeSpec
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the matrices if the kernel multiplies the tokens x ``[T, hidden]`` by both."""
    if len(x) <= _FEW_TOKENS or not (_reads(first, x) and _reads(second, x)):
        return None
    whole = not (x.shape[1] % 128 or spec.intermediate_size % _BOX) and support.in_pieces(x) and x.stride(1) == 1
    kinds = experts.dtype == torch.int32 and factors.dtype == torch.float32
    fits = whole and kinds and experts.is_contiguous() and factors.is_contiguous()
    fits = fits and spec.gated and spec.act in ("silu", "swish") and choose_sizes(experts.numel(), len(first)) is not None
    return (first, second) if fits and not refusals(x.device) else None


def _reads(held: Held, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether the kernel multiplies x by the matrices."""
    if not isinstance(held, torch.Tensor) or held.dtype != x.dtype or x.dtype not in _KINDS:
        return False
    return held.is_contiguous() and not held.data_ptr() & 15 and not len(held) % 32 and len(held) <= _MAX_EXPERTS


def products(
    x: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    sizes: MlpSizes | None = None,
) -> torch.Tensor:
    """The output of each choice times its factor, ``[choices, hidden]``. Nothing is written for choices of no expert.

    Args:
        x: ``[T, hidden]``
        experts: ``[T, top_k]`` int32, contiguous; those from ``len(first)`` on are none.
        factors: ``[T, top_k]`` float32, contiguous.
        first: ``[experts, 2 * inner, hidden]``: gates, then ups.
        second: ``[experts, hidden, inner]``
    """
    count, hidden, inner = second.shape
    choices = experts.numel()
    sizes = sizes or choose_sizes(choices, count)
    if sizes is None:
        raise ValueError(f"{choices} choices among {count} experts are too many")
    middle = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(choices, hidden, dtype=x.dtype, device=x.device)
    columns, blocks = _LINE // x.itemsize, sizes.resident * support.resources(x.device).multiprocessors
    weights = (tensor_map(held.view(-1, held.shape[2]), _BOX, columns, promotion=_PROMOTION) for held in (first, second))
    tensors = x, experts, factors, middle, y, support.counters("mlp", x.device, _COUNTERS)
    _kernel(sizes, x.dtype, experts.shape[1], count, hidden, inner, blocks).launch(
        (blocks, 1, 1), *weights, tensor_map(middle, 8, columns),
        *(tensor.data_ptr() for tensor in tensors), x.stride(0) * x.itemsize, choices,
    )  # fmt: skip
    return y


@functools.cache
def _kernel(sizes: MlpSizes, kind: torch.dtype, top_k: int, experts: int, hidden: int, inner: int, blocks: int) -> CudaKernel:
    macros = {"KIND": _KINDS[kind], "ROWS": sizes.rows, "LINES": sizes.lines, "DOWN_LINES": sizes.down_lines}
    macros |= {"STAGES": sizes.stages(experts), "RESIDENT": sizes.resident, "CHOICES": sizes.choices(experts), "TOP_K": top_k}
    macros |= {"EXPERTS": experts, "HIDDEN": hidden, "INNER": inner, "BLOCKS": blocks}
    return CudaKernel(_SOURCE, "expert_mlp", "MMMPPPPPPqi", macros, _THREADS, sizes.shared(experts))
