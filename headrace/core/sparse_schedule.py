"""SparseSchedule: what the scheduler keeps about prompts that attend sparsely."""

from __future__ import annotations

from headrace.config import SparseConfig
from headrace.core.plan import LayerRange, SparseOutcome
from headrace.core.request import Request
from headrace.core.sequence import Sequence, Status
from headrace.core.sparse import Decisions, SparsePrompt
from headrace.core.step import StepBuilder
from headrace.kv import KVCacheManager


class SparseSchedule:
    def __init__(self, kv: KVCacheManager, config: SparseConfig | None) -> None:
        self._kv = kv
        self._config = config
        self._decisions = Decisions()
        self._layered: Sequence | None = None
        """The sequence whose piece is under way, layer by layer: other pieces begin when it is complete."""
        self.abandoned = False
        """A piece was abandoned between two layers, and no plan has released its slot, and so its hidden states, since."""

    def prompt(self, request: Request) -> SparsePrompt | None:
        """A prompt that attends sparsely; None: it is dense."""
        return SparsePrompt.of(request, self._config)

    def layers(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> int:
        """Number of layers of the sequence's piece that the step may compute."""
        if self._config is None or (self._layered is not None and self._layered is not seq):
            return 0
        return step.layers_of(seq, num_tokens, len(self._config.heads))

    def begin(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> LayerRange | None:
        """Begins the layers of a piece that the step may compute, or goes on with them. None: the row computes all layers."""
        if self._config is None or not seq.whole(seq.num_computed):
            return None
        first, total = seq.num_layers, len(self._config.heads)
        layers = LayerRange(first, first + self.layers(seq, num_tokens, step), total)
        self._layered = None if layers.last else seq
        return layers if first or not layers.last else None

    def leaves(self, seq: Sequence) -> None:
        """The sequence leaves its slot, and the layers of its piece are computed again."""
        if self._layered is seq:
            self._layered, seq.num_layers, self.abandoned = None, 0, True

    def recall(self, seq: Sequence) -> None:
        """Takes over the decision of an equal prompt, which is what KV of its prefix is found by."""
        decision = None if seq.sparse is None else self._decisions.find(seq.sparse, self._kv.generation)
        if decision is not None and seq.sparse is not None:
            seq.sparse.decision = decision
            self._kv.identify(seq.blocks, seq.sparse.identity)

    def collected(self, seq: Sequence, start: int, end: int, outcome: SparseOutcome) -> None:
        """Records the outcome of a step for tokens ``start`` to ``end`` of a prompt."""
        sparse = seq.sparse
        if sparse is None:
            return
        if outcome.decision and sparse.decide(start, outcome.decision):
            self._kv.identify(seq.blocks, sparse.identity)
            if self._kv.caching:
                self._decisions.keep(sparse, self._kv.generation)
        if seq.status is Status.RUNNING:
            sparse.count_blocks(start, end, outcome.kept)


def share_prompt(kv: KVCacheManager, seq: Sequence, sibling: Sequence, boundary: int) -> None:
    """Gives a sample what another one of its request has computed of their prompt: its first ``boundary`` tokens."""
    if seq.sparse is not None and sibling.sparse is not None:
        sibling.sparse.decision = seq.sparse.decision
        kv.identify(sibling.blocks, sibling.sparse.identity)
    if boundary and kv.can_fork(seq.blocks, boundary):
        kv.fork(seq.blocks, sibling.blocks, boundary)
        if seq.routed_experts is not None and sibling.routed_experts is not None:
            sibling.routed_experts.begin([seq.routed_experts.first(boundary)], boundary)
