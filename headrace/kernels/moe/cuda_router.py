"""The choice of some tokens' experts in one launch, on Hopper GPUs: the kernel of ``router.cu``. References: ``router_logits``,
``route`` and ``triton_sort``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals
from headrace.kernels.moe.tiling import most_tiles
from headrace.kernels.moe.triton_experts import Held, Prepared, product_tiling, rounding_for
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


class Choice(NamedTuple):
    """The experts of tokens."""

    experts: torch.Tensor
    """``[T, top_k]`` int32"""
    weights: torch.Tensor
    """``[T, top_k]`` float32"""
    prepared: Prepared | None


def choose_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    spec: MoeSpec,
    gate_up: Held | None,
) -> Choice:
    """Kernel version of ``headrace.kernels.moe.choose_experts``, for what it ``takes``."""
    (tokens, hidden), device = x.shape, x.device
    choices = tokens * spec.top_k
    experts = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=device)
    rounding, routing, tile = None, None, 0
    if gate_up is not None:
        rounding = rounding_for(x, gate_up)
        if rounding is not None and (rounding.group < hidden or rounding.held.x_scale is not None):
            rounding = None
        if tokens <= _SORTED:
            tile = product_tiling(gate_up, x, choices, spec.num_held, spec.intermediate_size, paired=spec.gated).tokens
            routing = _unsorted(choices, spec.num_experts, tile, device)
    rows = min(max(support.power_of_two(tokens if tokens <= _SORTED else cdiv(tokens, _CLUSTERS)), 8), 64)
    kernel = _kernel(spec, hidden, rows, bias is not None, correction is not None, tile, rounding is not None)
    sort = (None, None, None) if routing is None else (routing.order, routing.start, routing.table)
    rounded = (None, None) if rounding is None else (rounding.codes, rounding.scales)
    tensors = x, weight, bias, correction, experts, weights, *sort, *rounded
    kernel.launch(
        (CLUSTER * cdiv(tokens, rows), 1, 1), *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        x.stride(0) * x.itemsize, tokens, 0 if routing is None else routing.tiles(tile), spec.least_sum, spec.added_sum,
        spec.routed_scale,
    )  # fmt: skip
    return Choice(experts, weights, None if gate_up is None else Prepared(routing, rounding))


def _unsorted(choices: int, count: int, tile: int, device: torch.device) -> Routing:
    """Makes the tensors of sorted choices, which nothing has filled yet."""
    order = torch.empty(choices, dtype=torch.int32, device=device)
    start = torch.empty(count + 1, dtype=torch.int32, device=device)
    table = torch.empty(most_tiles(choices, count, tile), 4, dtype=torch.int32, device=device)
    return Routing(choices, count, True, order, start, table, tile)


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
