"""Sequence: the state of one sample of a request."""

from __future__ import annotations

import dataclasses
import enum

import msgspec

from headrace.core.items import chunk_length, least_chunk
from headrace.core.matcher import Matcher
from headrace.core.points import ChunkGrid
from headrace.core.request import Request
from headrace.core.sparse import SparsePrompt
from headrace.kv import Item, SequenceBlocks, TokenRows
from headrace.outputs import Failure, FinishReason, PrefixReport, RequestTimes, TokenLogprobs


class Status(enum.Enum):
    WAITING = "waiting"
    """Has no slot yet; or waits until the first sample of its request has computed their prompt, or for its matcher."""
    RUNNING = "running"
    """Has a slot."""
    PREEMPTED = "preempted"
    """Waits again: slot and KV blocks are gone, tokens are kept."""
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The scheduler's state of one sample of a request.

    ``token_ids`` holds the prompt and the known outputs. Each launched logits row adds a *placeholder*, a token that only the
    device knows until the step is collected. So the sequence has at most ``len(token_ids) + num_placeholders`` tokens.
    ``num_computed`` of them have their KV in the cache once all launched steps have run, ``num_collected`` already have.
    A result with fewer tokens than its row has logits rows lowers these counts again. Past its prefill, the sequence always
    has one token that is not computed, the last one.
    """

    seq_id: int
    """Unique and rising: also the order of arrival."""
    request: Request
    index: int
    """Index of the sample within the request."""
    blocks: SequenceBlocks
    max_model_len: dataclasses.InitVar[int]
    first: dataclasses.InitVar[Sequence | None] = None
    """Another sample of the request."""
    sparse: SparsePrompt | None = None
    """None: its prompt attends densely."""
    stop_token_ids: frozenset[int] = dataclasses.field(init=False)
    """The request's stop tokens: its samples share the set."""
    ending_token_ids: frozenset[int] = dataclasses.field(init=False)
    """These and the end-of-sequence tokens, unless the request ignores them."""
    token_ids: list[int] = dataclasses.field(init=False)
    num_prompt: int = dataclasses.field(init=False)
    max_len: int = dataclasses.field(init=False)
    """The sequence ends at this length."""
    continues_until: int = dataclasses.field(init=False)
    """Below this length only a token of ``ending_token_ids`` ends the sequence; 0: its constraint may end it anywhere."""
    items: tuple[Item, ...] = dataclasses.field(init=False)
    status: Status = Status.WAITING
    slot: int = -1
    """Valid while the sequence runs."""
    prefill_len: int = 0
    """Length when the sequence took its slot: up to here its rows are prefill, afterwards decode. One more if its prompt is
    pooled, so that it never decodes."""
    num_computed: int = 0
    num_collected: int = 0
    chunks: ChunkGrid | None = None
    """Ends of the prompt's chunks, of models with state layers."""
    num_layers: int = 0
    """Layers computed of the piece that begins at ``num_computed``; 0: none is under way."""
    num_encoded: int = 0
    """Encoders have run for the items that start before this token."""
    num_placeholders: int = 0
    drafts: tuple[int, ...] = ()
    """Proposed tokens behind the known ones. The next row verifies them; they are dropped when it is collected."""
    num_in_flight: int = 0
    """Rows in steps that are launched and not yet collected."""
    passed_over: int | None = None
    """Number of the first step for which its adapter had no room; None: it does not wait for room."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache whenever the request began to run: those that it never computed."""
    num_preemptions: int = 0
    """Times that an earlier sequence took its KV blocks."""
    waited_for: str = ""
    """See ``RequestTimes.waited_for``."""
    cache: PrefixReport | None = None
    """Report of what it found there last, of models with state layers."""
    siblings: list[Sequence] = dataclasses.field(default_factory=list)
    """Samples of the same request that wait until this one has computed their prompt."""
    matcher: Matcher | None = None
    """State of the request's constraint after the known outputs; None: there is no constraint, or it is being compiled."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Logprobs of prompt tokens 1, 2, ..., filled in as they are computed; None: not requested, or delivered already."""
    routed_experts: TokenRows | None = None
    """Choices for the tokens that are computed, filled in with their steps; None: not requested."""
    versions: list[tuple[int, str]] = dataclasses.field(default_factory=lambda: [(0, "0")])
    """(output tokens before it, name) of each version of the weights that the sequence has met."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Failure | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self, max_model_len: int, first: Sequence | None) -> None:
        stops = self.request.sampling.stop_token_ids
        self.stop_token_ids = frozenset(stops or ()) if first is None else first.stop_token_ids
        ends = () if self.request.sampling.ignore_eos else self.request.eos_token_ids
        self.ending_token_ids = self.stop_token_ids.union(ends) if first is None else first.ending_token_ids
        self.token_ids = self.blocks.token_ids
        self.num_prompt = len(self.request.prompt_token_ids)
        self.max_len = min(self.num_prompt + self.request.max_tokens, max_model_len)
        if self.request.pooling is not None:
            self.max_len = self.num_prompt + 1  # Never reached: it ends with its prompt.
        self.continues_until = self.max_len - 1 if self.request.constraint is None else 0
        self.items = self.blocks.identity.items
        if self.request.sampling.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = [None] * (self.num_prompt - 1)
        if self.request.sampling.return_routed_experts:
            self.routed_experts = self.blocks.rows = TokenRows()

    @property
    def num_tokens(self) -> int:
        """Length, placeholders included."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def pooled(self) -> bool:
        """Whether the prompt is pooled, so that no token follows it."""
        return self.request.pooling is not None

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def computes_all(self) -> bool:
        """Whether its result is made of all tokens of the prompt, so that no cached prefix can stand in for some of them."""
        pooling = self.request.pooling
        pooled = pooling is not None and pooling.computes_all
        return pooled or self.prompt_logprobs is not None

    @property
    def ready(self) -> bool:
        """False while its constraint is being compiled."""
        return self.matcher is not None or self.request.constraint is None

    def cut(self, start: int, end: int, limit: int) -> int:
        """Length of a chunk from ``start``: at most ``limit`` tokens of ``[start, end)``; 0 if what cannot be cut is longer."""
        if self.sparse is not None:
            return self.sparse.cut(start, end, limit)
        if self.chunks is not None:
            return self.chunks.cut(start, end, limit, self.items)
        return chunk_length(start, end, limit, self.items)

    def least_chunk(self, start: int) -> int:
        """Smallest length of a chunk from ``start``."""
        if self.chunks is not None:
            return self.chunks.least(start, len(self.token_ids), self.items)
        return least_chunk(start, self.items) if self.sparse is None else self.sparse.least(start)

    def whole(self, start: int) -> bool:
        """Whether the chunk from ``start`` must be one piece, beyond a step's budget of tokens if need be."""
        return self.sparse is not None and self.sparse.whole(start)

    def is_sparse(self, start: int) -> bool:
        """Whether the row from ``start`` attends sparsely. No row has tokens of both kinds."""
        return self.sparse is not None and start < self.num_prompt

    @property
    def decoding(self) -> bool:
        """True past prefill. The last chunk of a prompt is prefill even if it has one token."""
        return self.num_computed >= self.prefill_len

    @property
    def times(self) -> RequestTimes:
        marks = self.request.arrival_time, self.scheduled_at, self.first_token_at, self.finished_at
        return RequestTimes(*marks, self.waited_for, self.num_preemptions)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}[{self.index}], {self.status.value}, "
            f"{self.num_prompt}+{self.num_outputs} tokens, {self.num_computed} computed)"
        )


class SequenceUpdate(msgspec.Struct, gc=False):
    """The changes that one collected step brought to one sequence."""

    seq: Sequence
    token_ids: list[int] = []
    """New output tokens, including the one that stops the sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """An entry for each of ``token_ids``; None if not requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Logprobs of prompt tokens 1, 2, ... (token 0 has none): once, with the request's first sample, when all are known."""
    pooled: bytes | None = None
    """``StepResult.pooled`` of a prompt that is pooled, with ``finish_reason`` "stop"."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hides_last: bool = False
    """The last token stops the sequence and has no text."""
    error: Failure | None = None
    """Cause if ``finish_reason`` is "error"."""
