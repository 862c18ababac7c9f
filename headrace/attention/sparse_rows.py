"""SparseRows: what attention needs to know of the rows of a step that attend sparsely."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class RoutedRows:
    """Rows, N of them, whose segment of a prompt is in the step as a whole, and whose heads the router classifies in it."""

    slots: torch.Tensor
    """``[N]`` int64"""
    segments: torch.Tensor
    """``[N]`` int64"""
    keys: torch.Tensor
    """``[P]`` int64: tokens of the packed batch whose keys are pooled: of each row the prompt's first ones, where they are in
    the step, and then the segment's last ones."""
    key_start: torch.Tensor
    """``[2 N + 1]`` int32: where the first keys and the last keys of each row begin in ``keys``."""
    earlier: torch.Tensor | None
    """``[N]`` bool: rows whose first keys were pooled in an earlier step; None: of no row."""


@dataclasses.dataclass(frozen=True)
class SparseRows:
    """The last rows of a step, R of them: chunks of prompts that begin at multiples of the sparse grid's block."""

    first: int
    """Number of the first one among the rows of the step."""
    pairs: torch.Tensor
    """``[R]`` int64: pairs of a query block and a key block in dense attention, for one head."""
    streamed: torch.Tensor
    """``[R]`` int64: the same of a streaming head."""
    kept: torch.Tensor
    """``[layers, R]`` int64, zeros: a layer that can attend sparsely fills in the pairs that it attends to, over all query
    heads."""
    slots: torch.Tensor
    """``[R]`` int64"""
    segments: torch.Tensor
    """``[R]`` int64: the segment of its prompt that a row is in."""
    prompt_lens: torch.Tensor
    """``[R]`` int64, of the whole prompts."""
    classes: torch.Tensor | None = None
    """``[slots, segments, layers, kv_heads]`` int8: the router's answers; None: there is no router."""
    heads: torch.Tensor | None = None
    """``[slots, layers, kv_heads, head_dim]`` float32: means of the first keys of prompts with several segments."""
    routed: RoutedRows | None = None
    """None: every answer is known."""

    def classes_of(self, layer: int, kv_heads: int) -> torch.Tensor:
        """``[R, kv_heads]`` int8."""
        if self.classes is None:
            raise ValueError("there is no router")
        return self.classes[self.slots, self.segments, layer, :kv_heads]
