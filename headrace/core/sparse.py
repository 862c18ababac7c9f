"""SparsePrompt: a prompt that attends sparsely, and where its chunks may be cut.

Selectors see whole blocks of queries, so chunks begin and end at multiples of a block, or end with the prompt. A router sees
a whole *segment* of the prompt, as a rule all of it: until its answer is known, a segment is computed in one *piece*, of
which a step may compute some of the layers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from headrace.config import SparseConfig
from headrace.core.request import Request
from headrace.kv.identity import SparseIdentity
from headrace.model_spec import HEAD_TYPES
from headrace.outputs import AttentionReport

_TYPE_NAMES = {kind: name for name, kind in HEAD_TYPES.items()}
_DECISIONS_KEPT = 4096
"""Prompts whose decisions are remembered; some hundred bytes each."""


def segment_length(prompt_len: int, most: int, block: int) -> int:
    """Length of the segments of a prompt that the router sees one by one: all of a prompt of up to ``most`` tokens.

    A longer prompt has segments of whole blocks, such that the last may be longer by less than a block.
    """
    return prompt_len if prompt_len <= most else most // block * block - block


def num_segments(prompt_len: int, length: int, block: int) -> int:
    return 1 if prompt_len <= length else (prompt_len - block) // length + 1


@dataclasses.dataclass(slots=True)
class SparsePrompt:
    """The prompt of one sequence."""

    config: SparseConfig
    request: Request
    decision: bytes | None
    """Classes ``[segments, layers, kv_heads]`` that the router gave to the heads; empty: there is no router; None: not
    known yet."""
    num_prompt: int = dataclasses.field(init=False)
    length: int = dataclasses.field(init=False)
    """Tokens of a segment."""
    count: int = dataclasses.field(init=False)
    """Number of segments."""
    parts: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Segment -> its part of the decision, as far as known."""
    kept: list[int] = dataclasses.field(default_factory=list)
    """Per layer, pairs of query block and key block that were attended in the rows computed so far, over all heads."""
    pairs: int = 0
    """Pairs that dense attention has in these rows, for one head."""

    _digest: bytes | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        most = self.config.max_exact_tokens if self.config.routed else self.num_prompt
        self.length = segment_length(self.num_prompt, most, self.config.block)
        self.count = num_segments(self.num_prompt, self.length, self.config.block)

    @classmethod
    def of(cls, request: Request, config: SparseConfig | None) -> SparsePrompt | None:
        """None: the prompt attends densely. ``check_request`` has refused what cannot be."""
        asked = request.sampling.sparse_prefill
        if config is None or request.items or asked is False:
            return None
        if not asked and len(request.prompt_token_ids) < config.min_tokens:
            return None
        return cls(config, request, None if config.routed else b"")

    @property
    def digest(self) -> bytes:
        """Returns the hash of the prompt and of the salt, which keeps its KV apart from that of an equal prompt."""
        if self._digest is None:
            digest = hashlib.blake2b(self.request.cache_identity.root(), digest_size=16)
            digest.update(array("q", self.request.prompt_token_ids).tobytes())
            self._digest = digest.digest()
        return self._digest

    @property
    def identity(self) -> SparseIdentity:
        return SparseIdentity(self.config.block, self.num_prompt, self.decision, self.config.selector.by_length)

    def segment(self, start: int) -> int:
        """The segment of the token at ``start``."""
        return min(start // self.length, self.count - 1)

    def end(self, start: int) -> int:
        """The end of that segment."""
        segment = self.segment(start)
        return self.num_prompt if segment == self.count - 1 else (segment + 1) * self.length

    def whole(self, start: int) -> bool:
        """Whether the segment of ``start`` must be computed in one piece."""
        return self.decision is None and start < self.num_prompt

    def cut(self, start: int, end: int, limit: int) -> int:
        """Length of a chunk from ``start``: at most ``limit`` tokens of ``[start, end)``; 0 if none fits."""
        stop = min(end, start + limit)
        if start >= self.num_prompt:
            return max(0, stop - start)
        last = self.end(start)
        if stop >= last:
            return last - start
        return 0 if self.whole(start) else max(0, stop // self.config.block * self.config.block - start)

    def least(self, start: int) -> int:
        """Smallest length of a chunk from ``start``."""
        if start >= self.num_prompt:
            return 1
        rest = self.end(start) - start
        return rest if self.whole(start) else min(self.config.block, rest)

    def decide(self, start: int, part: bytes) -> bool:
        """Takes the router's answer for the segment of ``start``. True: the decision is complete now, and was not before."""
        self.parts[self.segment(start)] = part
        if self.decision is not None or len(self.parts) < self.count:
            return False
        self.decision = b"".join(self.parts[segment] for segment in range(self.count))
        return True

    def count_blocks(self, start: int, end: int, kept: Sequence[int]) -> None:
        """Adds the pairs of blocks of a row."""
        self.pairs += block_pairs(start, end, self.config.block)
        self.kept = list(kept) if not self.kept else [a + b for a, b in zip(self.kept, kept, strict=True)]

    def report(self) -> AttentionReport:
        """Reports the prompt's attention, as far as it was computed."""
        config, dense = self.config, [heads * self.pairs for heads in self.config.heads]
        kept, total = sum(self.kept), sum(dense)
        return AttentionReport(
            mode="elastic" if config.routed else config.selector.name,
            density=kept / total if total else None,
            computed=self.pairs,
            block=config.block,
            threshold=config.selector.threshold,
            exact=self.count == 1,
            layers=[part / whole if whole else None for part, whole in zip(self.kept, dense, strict=bool(self.kept))],
            head_types=self._head_types(),
        )

    def _head_types(self) -> list[list[list[str]]]:
        if not self.decision or self.config.types is None:
            return []
        names = [_TYPE_NAMES[kind] for kind in self.config.types]
        layers = len(self.config.heads)
        width = len(self.decision) // (self.count * layers)
        rows = [[names[answer] for answer in self.decision[at : at + width]] for at in range(0, len(self.decision), width)]
        return [rows[at : at + layers] for at in range(0, len(rows), layers)]

    def restart(self) -> None:
        """The rows computed so far are discarded."""
        self.kept, self.pairs = [], 0


def block_pairs(start: int, end: int, block: int) -> int:
    """Pairs of a query block and a key block in causal attention of the tokens ``[start, end)``, which begin with a block."""
    first, last = start // block, -(-end // block)
    return (last * (last + 1) - first * (first + 1)) // 2


class Decisions:
    """Decisions of prompts computed lately: only with them can an equal prompt start from cached blocks."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[bytes, bytes] = OrderedDict()
        self._generation = -1

    def find(self, prompt: SparsePrompt, generation: int) -> bytes | None:
        """``generation``: of the cache; decisions of another one are forgotten."""
        self._renew(generation)
        return self._by_prompt.get(prompt.digest) if self._by_prompt else None

    def keep(self, prompt: SparsePrompt, generation: int) -> None:
        """``prompt``: whose decision is known."""
        self._renew(generation)
        self._by_prompt[prompt.digest] = prompt.decision or b""
        self._by_prompt.move_to_end(prompt.digest)
        if len(self._by_prompt) > _DECISIONS_KEPT:
            self._by_prompt.popitem(last=False)

    def _renew(self, generation: int) -> None:
        if generation != self._generation:
            self._by_prompt.clear()
            self._generation = generation
