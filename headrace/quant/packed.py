"""PackedMethod: what the CPU's packed number formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.layers.linear import Linear, LinearMethod
from headrace.layers.stored import Codes, StoredMatrix
from headrace.quant.float_codes import MicroscaledCodes
from headrace.quant.groups import GroupCodes, concatenate, round_to_groups, rows_at_once

_SAMPLED_ROWS = 256
"""Rows that an error is computed over, evenly spread."""


class PackedMethod(LinearMethod):
    """Quantised weights in buffers of the layer, which then has no parameter ``weight``."""

    devices = frozenset({"cpu"})

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        """Frees the floats. Packing makes new tensors, which ``load`` registers."""
        self.dtype = dtype
        """Dtype of the activations."""
        if "weight" in layer._parameters:
            del layer.weight

    def rewrite(self, layer: Linear, parts: Sequence[StoredMatrix]) -> None:
        """Loads other weights into the memory that holds the present ones, which captured graphs and addresses refer to.

        Raises:
            OverflowError: the method does not hold them.
        """
        self.reload(layer, parts)

    def reload(self, layer: Linear, parts: Sequence[StoredMatrix]) -> None:
        """Loads the matrices that it was loaded from, with their codes, into the memory that holds the present ones."""
        device = next(layer.buffers()).device
        other = Linear(layer.in_features, layer.out_features, dtype=self.dtype, device="meta")
        method = self.fresh()
        method.allocate(other, self.dtype, device)
        method.load(other, parts)
        for name, buffer in other.named_buffers():
            copy_numbers(buffer, layer.get_buffer(name))


def copy_numbers(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies numbers of the same type. Some devices have no copy of FP8."""
    if target.dtype == torch.float8_e4m3fn:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.copy_(source)


def finish(layer: Linear, y: torch.Tensor) -> torch.Tensor:
    """Adds the bias and converts to the layer's ``out_dtype``."""
    if layer.bias is not None:
        y = y + layer.bias
    return y if layer.out_dtype is None else y.to(layer.out_dtype)


def kept_codes(part: StoredMatrix, bits: int) -> GroupCodes | None:
    """The codes of a matrix in groups of 32, widened where they have fewer bits; None: other codes must be chosen."""
    codes = integer_codes(part.codes)
    kept = None if codes is None or codes.bits > bits else codes.regroup()
    return kept if kept is None or kept.bits == bits else kept.widen()


def integer_codes(codes: Codes | None) -> GroupCodes | None:
    """Stored codes as integers in groups; None: they are no such."""
    if isinstance(codes, MicroscaledCodes):
        return codes.integers()
    return codes if isinstance(codes, GroupCodes) else None


def group_codes(parts: Sequence[StoredMatrix], bits: int, step: torch.dtype, anchor: int) -> GroupCodes:
    """One matrix of all parts: codes are kept where they can be, and everything else is rounded. ``step`` and ``anchor``: as of
    ``round_to_groups``."""
    codes = []
    for part in parts:
        kept = kept_codes(part, bits)
        codes.append(round_to_groups(part.exact(), bits, step, anchor) if kept is None else kept)
    return concatenate(codes)


def rounding_error(held: Callable[[slice], torch.Tensor], parts: Sequence[StoredMatrix]) -> float:
    """Relative error of the weights that a layer holds, over some rows; exactly 0 for codes that are kept.

    Args:
        held: dequantises some rows of the layer.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    start = 0
    for part in parts:
        whole = part.codes if isinstance(part.codes, GroupCodes) else part.exact()
        rows, columns = whole.shape
        every = max(1, rows * len(parts) // _SAMPLED_ROWS)
        span = every * rows_at_once(columns)
        for first in range(0, rows, span):
            sampled = slice(first, min(first + span, rows), every)
            exact = whole[sampled] if isinstance(whole, torch.Tensor) else whole.rows(sampled).dequantize()
            error = held(slice(start + sampled.start, start + sampled.stop, every)) - exact
            sums += torch.stack([one.float().square().sum(dtype=torch.float64) for one in (error, exact)])
        start += rows
    error_of, size = sums.tolist()
    return float((error_of / size) ** 0.5) if size else float(error_of**0.5)
