"""The choice of some tokens' experts in one launch, on Hopper GPUs: the kernel of ``router.cu``. References: ``router_logits``,
``route`` and ``triton_sort``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals
from headrace.kernels.moe.tiling import most_tiles
from headrace.kernels.moe.triton_rounding import Rounding
from headrace.kernels.moe.triton_sort import Routing, is_sorted
from headrace.kernels.support import cdiv
from headrace.model_spec import MoeSpec

MAX_TOKENS = 512
"""Tokens up to which the kernel is the fastest, as measured."""
CLUSTER = 16
"""Blocks that share the channels."""
_SORTED, _CLUSTERS, _CHANNELS = 32, 4, 128
"""Tokens up to which one cluster sorts them too, clusters that share more, and channels that a block multiplies at a time."""
_SOURCE = Path(__file__).with_name("router.cu")


def takes(x: torch.Tensor, weight: torch.Tensor, spec: MoeSpec) -> bool:
    """Whether the kernel chooses the experts of x ``[T, hidden]``: of so few tokens that theirs are not sorted it is slower."""
    experts, hidden = weight.shape
    fits = not experts % 32 and experts <= 128 and not hidden % (CLUSTER * _CHANNELS) and hidden <= 4096
    some = len(x) <= MAX_TOKENS and is_sorted(len(x), len(x) * spec.top_k, experts)
    fits = fits and x.dtype == torch.bfloat16 and support.in_pieces(x)
    return fits and some and spec.top_groups >= spec.num_groups and spec.top_k <= 32 and not refusals(x.device)


def choose_experts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None, spec: MoeSpec,
    rounding: Rounding | None, tile: int
) -> tuple[torch.Tensor, torch.Tensor, Routing | None]:  # fmt: skip
    """Kernel version of ``headrace.kernels.moe.route`` of ``router_logits``, for what it ``takes``.

    Args:
        rounding: of x, with one scale a row; is done.
        tile: rows of the tiles that the experts' products take; 0: nothing is sorted.

    Returns:
        Experts, weights, and their order, if it is one that the kernel makes.
    """
    tokens, device, choices = len(x), x.device, len(x) * spec.top_k
    experts = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=device)
    sort = tile > 0 and tokens <= _SORTED
    routing, places = None, (0, 0, 0)
    if sort:
        tiles = most_tiles(choices, spec.num_experts, tile)
        order = torch.empty(choices, dtype=torch.int32, device=device)
        start = torch.empty(spec.num_experts + 1, dtype=torch.int32, device=device)
        table = torch.empty(tiles, 4, dtype=torch.int32, device=device)
        routing = Routing(choices, spec.num_experts, True, order, start, table, tile)
        places = order.data_ptr(), start.data_ptr(), table.data_ptr()
    rows = min(max(support.power_of_two(tokens if tokens <= _SORTED else cdiv(tokens, _CLUSTERS)), 8), 64)
    kernel = _kernel(
        spec, x.shape[1], rows, bias is not None, correction is not None, tile if sort else 0, rounding is not None
    )
    kernel.launch(
        (CLUSTER * cdiv(tokens, rows), 1, 1), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if correction is None else correction.data_ptr(), experts.data_ptr(), weights.data_ptr(), *places,
        0 if rounding is None else rounding.codes.data_ptr(), 0 if rounding is None else rounding.scales.data_ptr(),
        x.stride(0) * x.itemsize, tokens, 0 if routing is None else routing.tiles(tile), spec.least_sum, spec.added_sum,
        spec.routed_scale,
    )  # fmt: skip
    return experts, weights, routing


@functools.cache
def _kernel(spec: MoeSpec, hidden: int, rows: int, bias: bool, correction: bool, tile: int, rounds: bool) -> CudaKernel:
    """``tile``: 0 for no sort."""
    macros = {"EXPERTS": spec.num_experts, "IN": hidden, "CLUSTER": CLUSTER, "ROWS": rows, "TOP_K": spec.top_k}
    macros |= {"SIGMOID": spec.scoring == "sigmoid", "NORMALIZE": spec.normalize, "BIAS": bias, "CORRECTION": correction}
    macros |= {"SORT": tile > 0, "TILE": max(tile, 1), "ROUND": rounds}
    shared = rows * (2 * hidden // CLUSTER + 64 + 4 * (spec.num_experts + 4) + 4 * CLUSTER + spec.top_k) + 4 * spec.num_experts
    macros = {name: int(value) for name, value in macros.items()}
    threads = 2 * spec.num_experts
    return CudaKernel(_SOURCE, "route_tokens", "PPPPPPPPPPPqiifff", macros, threads, cdiv(shared, 16) * 16, CLUSTER)
