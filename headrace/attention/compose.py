"""Compositions: backends by row class, and one beside a layer's usual one; and steps made from some rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs, LayerCache, ReplayLengths, Scratch, StepMetadata
from headrace.kernels.transfer import upload


def output_of(step: StepMetadata, inputs: AttentionInputs) -> torch.Tensor:
    """``[T, num_heads, v_head_dim]``: ``inputs.out``, or a new tensor in which tokens of no row are 0."""
    if inputs.out is not None:
        return inputs.out
    q, spec, end = inputs.q, inputs.cache.spec, step.tokens.stop
    tokens = q.shape[0]
    out = torch.empty(tokens, spec.num_heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
    if tokens > end:
        out[end:].zero_()
    return out


class Composition(AttentionBackend):
    """Several backends, of which those that ``plan`` made active fill their rows of one output.

    Args:
        captured: these run captured steps. The first decides whether steps can be captured.
        others: these run other steps.
    """

    def __init__(
        self, captured: Sequence[AttentionBackend], others: Sequence[AttentionBackend] = (), scratch: Scratch | None = None
    ) -> None:
        super().__init__(scratch)
        self._captured, self._parts = captured, (*captured, *others)
        self.capturable = captured[0].capturable
        self.plans_replays = any(backend.plans_replays for backend in captured)
        self._active: list[AttentionBackend] = []

    @property
    def graph_version(self) -> int:
        return sum(backend.graph_version for backend in self._captured)

    def prepare_replay(self, lengths: ReplayLengths) -> None:
        for backend in self._captured:
            backend.prepare_replay(lengths)

    def reserve(self, device: torch.device) -> None:
        for backend in self._captured:
            backend.reserve(device)

    @property
    def workspaces(self) -> list[torch.Tensor]:
        return [space for backend in self._parts for space in backend.workspaces]

    def finishes(self, cache: LayerCache) -> bool:
        return len(self._active) == 1 and self._active[0].finishes(cache)

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        if len(self._active) == 1:
            return self._active[0].run(inputs)
        out = output_of(self.step, inputs)
        inputs = inputs._replace(out=out)
        for backend in self._active:
            backend.run(inputs)
        return out.flatten(1)


class ByRowClass(Composition):
    """Splits a step between two backends, each of which fills its rows of one output.

    ``decode`` runs whole captured steps if ``prefill`` cannot be captured.

    Args:
        eager_decode: ``decode`` runs whole steps outside captures.
    """

    def __init__(self, name: str, decode: AttentionBackend, prefill: AttentionBackend, *, eager_decode: bool = False) -> None:
        super().__init__((decode, prefill))
        self.name = name
        self.modes = decode.modes & prefill.modes
        self.decode, self.prefill = decode, prefill
        self._eager_decode = eager_decode

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        whole = not self.prefill.capturable if step.bounded else self._eager_decode
        border = step.num_rows if whole else step.num_decode_rows
        self._active = []
        for backend, first, end in ((self.decode, 0, border), (self.prefill, border, step.num_rows)):
            if step.query_start_host[end] > step.query_start_host[first]:
                backend.plan(step.rows(first, end))
                self._active.append(backend)

    def prepare_replay(self, lengths: ReplayLengths) -> None:
        if not self.prefill.capturable:
            self.decode.prepare_replay(lengths)
            return
        decode, prefill = lengths.split()
        self.decode.prepare_replay(decode)
        self.prefill.prepare_replay(prefill)


class WithUsual(Composition):
    """A layer's usual backend, and another one for what that cannot run. Captured steps are the usual backend's alone."""

    def __init__(self, usual: AttentionBackend, other: AttentionBackend) -> None:
        super().__init__((usual,), (other,), usual.scratch)
        self.name = usual.name
        self.modes = usual.modes | other.modes
        self.usual, self._other = usual, other
        self._active = [usual]


def usual_of(backend: AttentionBackend) -> AttentionBackend:
    """Returns the backend of steps that attend densely and causally."""
    while isinstance(backend, WithUsual):
        backend = backend.usual
    return backend


class WithVisibleEnds(WithUsual):
    """Runs steps in which tokens see later ones by a separate backend, and all others by the layer's usual one."""

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._active = [self.usual if step.visible_ends is None else self._other]
        self._active[0].plan(step)


class StepPart(NamedTuple):
    """A part of a step's rows as a step: its tokens begin at 0."""

    step: StepMetadata
    tokens: slice | torch.Tensor
    """Indices of the part's tokens in the whole step."""


def part_of(step: StepMetadata, rows: np.ndarray) -> StepPart:
    """A step of the given ascending rows. Leading rows are views, which can be captured; others are copied."""
    count = len(rows)
    if int(rows[-1]) == count - 1:
        part = step.rows(0, count)
        return StepPart(part, slice(0, None) if part is step else part.tokens)
    device, starts = step.seq_lens.device, step.query_start_host
    tokens = upload(np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]).astype(np.int64), device)
    chosen = upload(rows, device)
    starts_host = np.concatenate(([0], np.cumsum(np.diff(starts)[rows]))).astype(np.int32)
    part = StepMetadata(
        num_decode_rows=int((rows < step.num_decode_rows).sum()),
        query_start=upload(starts_host, device),
        seq_lens=step.seq_lens[chosen],
        slot_mapping=tuple(slots[tokens] for slots in step.slot_mapping),
        block_tables=tuple(table[chosen] for table in step.block_tables),
        query_start_host=starts_host,
        seq_lens_host=step.seq_lens_host[rows],
        longest=step.longest,
    )
    return StepPart(part, tokens)
