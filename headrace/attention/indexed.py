"""Attention of rows whose tokens attend to the keys that an indexer chose, beside a layer's usual backend.

An indexer writes its keys in every step and chooses for the rows that are longer than its reach. All other rows attend to
everything that they see, and are the usual backend's.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs, LayerCache, StepMetadata
from headrace.attention.compose import Composition, StepPart, output_of, part_of
from headrace.attention.context import ForwardContext
from headrace.kernels.indexer import ChoiceRule, TokenPlaces, attend_chosen
from headrace.model_spec import AttentionSpec, IndexerSpec


def chosen_for(spec: AttentionSpec, ctx: ForwardContext) -> torch.Tensor:
    """Returns the choice that the layer attends by: its indexer's in this pass, or that of the layer whose choice it takes."""
    source = None if spec.indexer is None else spec.indexer.source
    return ctx.chosen[spec.layer if source is None else source]


def rule_of(indexer: IndexerSpec) -> ChoiceRule:
    """Returns the rule of the indexer's choice, as kernels take it."""
    return ChoiceRule(indexer.top_k, indexer.block, indexer.local)


class IndexedRows:
    """The rows of a step for which an indexer chooses.

    Args:
        invariant: a token's result does not depend on other tokens, nor on how much of its row is in the cache: the indexer
            chooses for all rows.
    """

    def __init__(self, step: StepMetadata, indexer: IndexerSpec, *, invariant: bool) -> None:
        self._indexer, self._invariant = indexer, invariant
        longer = step.seq_lens_host > indexer.reach
        if invariant or step.bounded:
            # Host lengths of a captured step are bounds: shorter rows are replayed in it.
            longer = np.ones_like(longer)
        rows = np.flatnonzero(longer)
        self.others = np.setdiff1d(np.arange(step.num_rows), rows, assume_unique=True)
        """The rows that attend to all that they see."""
        self.part: StepPart | None = part_of(step, rows) if len(rows) else None
        """None: there are no such rows."""

    @cached_property
    def places(self) -> TokenPlaces:
        """The rows' tokens, computed on the device, where a captured step has its lengths."""
        step = self._step
        starts, total = step.query_start, len(step.slot_mapping[0])
        first = 0 if isinstance(self.tokens, torch.Tensor) else self.tokens.start or 0
        count = total if isinstance(self.tokens, torch.Tensor) else len(range(total)[self.tokens])
        token = torch.arange(first, first + count, device=starts.device, dtype=starts.dtype)
        row = (torch.searchsorted(starts, token, right=True) - 1).clamp_(max=step.num_rows - 1)
        # The last query of a row is the last of its tokens.
        position = token - starts[row + 1] + step.seq_lens[row]
        held = (token < starts[-1]) & (step.seq_lens[row] > 0)
        return TokenPlaces(row.int(), torch.where(held, position, -1).int(), int(step.seq_lens_host.max()))

    @property
    def tokens(self) -> slice | torch.Tensor:
        """Indices of the rows' tokens in the packed batch."""
        if self.part is None:
            raise ValueError("the step has no rows for which an indexer chooses")
        return self.part.tokens

    @property
    def _step(self) -> StepMetadata:
        if self.part is None:
            raise ValueError("the step has no rows for which an indexer chooses")
        return self.part.step

    def table(self, group: int) -> torch.Tensor:
        """``[R, B]`` int32: the rows' block table in a cache group."""
        return self._step.block_tables[group]

    def attend(self, q: torch.Tensor, cache: LayerCache, chosen: torch.Tensor) -> torch.Tensor:
        """``[N, num_heads, head_dim]`` of the rows' tokens ``-> [N, num_heads, v_head_dim]``."""
        table, rule = self.table(cache.group), rule_of(self._indexer)
        kv, scale = (cache.keys, cache.values, table), cache.spec.scale
        return attend_chosen(q, *kv, self.places, chosen, rule, scale=scale, batch_invariant=self._invariant)


class WithIndexer(Composition):
    """Runs a layer's usual backend for rows within the indexer's reach, and attends to what was chosen in all others.

    Args:
        invariant: see ``IndexedRows``.
    """

    def __init__(self, usual: AttentionBackend, spec: AttentionSpec, *, invariant: bool) -> None:
        super().__init__((usual,), scratch=usual.scratch)
        if spec.indexer is None:
            raise ValueError(f"layer {spec.layer} has no indexer")
        self.name = usual.name
        # A captured step has no rows of the usual backend.
        self._captured, self.plans_replays = (), False
        self._usual, self._indexer, self._invariant = usual, spec.indexer, invariant
        self._few: StepPart | None = None
        self.indexed: IndexedRows | None = None

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self.indexed = IndexedRows(step, self._indexer, invariant=self._invariant)
        self._few = part_of(step, self.indexed.others) if len(self.indexed.others) else None
        if self._few is not None:
            self._usual.plan(self._few.step)

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        raise NotImplementedError("a layer with an indexer calls attend()")

    def attend(self, q: torch.Tensor, ctx: ForwardContext, spec: AttentionSpec) -> torch.Tensor:
        """Attends with the step's keys and values in the cache, q rotated, and the indexer's choice in the context.

        Returns:
            ``[T, num_heads * v_head_dim]``
        """
        inputs = AttentionInputs(q, ctx.caches[spec.layer])
        if self.indexed is None or self.indexed.part is None:
            return self._usual.run(inputs)
        tokens, out = self.indexed.tokens, output_of(self.step, inputs)
        out[tokens] = self.indexed.attend(q[tokens], inputs.cache, chosen_for(spec, ctx))
        if self._few is not None:
            own = self._usual.run(inputs._replace(q=q[self._few.tokens]))
            out[self._few.tokens] = own.view(-1, *out.shape[1:])
        return out.flatten(1)
