"""Sequence: the progress of one generation of a request."""

from __future__ import annotations

import dataclasses
import enum

from headrace.core.request import Request
from headrace.kv import SequenceBlocks
from headrace.outputs import FinishReason, RequestTimes, TokenLogprobs


class Status(enum.Enum):
    WAITING = "waiting"
    """Has no slot yet (or waits for its first sample to compute the prompt they share)."""
    RUNNING = "running"
    """Has a slot."""
    PREEMPTED = "preempted"
    """Waits again, having lost its slot and its blocks; keeps its tokens."""
    FINISHED = "finished"


class Sequence:
    """One sample of a request, as the scheduler sees it.

    ``token_ids`` holds what is known: prompt and outputs. Each launched step that samples adds a *placeholder*, a token that
    only the device knows, until the step is collected. So the sequence is ``len(token_ids) + num_placeholders`` tokens long,
    of which ``num_computed`` have their KV in the cache once all launched steps have run, and ``num_collected`` have it there
    for certain.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "error",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "incarnation",
        "index",
        "max_len",
        "num_cached_tokens",
        "num_collected",
        "num_computed",
        "num_in_flight",
        "num_placeholders",
        "num_prompt",
        "prefill_len",
        "prompt_logprobs",
        "request",
        "scheduled_at",
        "seq_id",
        "siblings",
        "slot",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: Request, index: int, blocks: SequenceBlocks, max_model_len: int) -> None:
        self.seq_id = seq_id
        """Unique and rising: also the order of arrival."""
        self.request = request
        self.index = index
        self.token_ids: list[int] = blocks.token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.max_len = min(self.num_prompt + request.max_tokens, max_model_len)
        """At this length the sequence ends."""
        self.blocks = blocks
        self.status = Status.WAITING
        self.slot: int | None = None
        self.incarnation = 0
        """Rises when the sequence loses its blocks: what older steps computed is gone, what they sampled still counts."""
        self.prefill_len = 0
        """Tokens known when the sequence took its slot: computing those is prefill, whatever comes after is decode."""
        self.num_computed = 0
        self.num_collected = 0
        self.num_placeholders = 0
        self.num_in_flight = 0
        """Launched rows not yet collected."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request first ran."""
        self.siblings: list[Sequence] = []
        """Samples of the same request that wait for this one to compute their prompt."""
        wants_prompt_logprobs = request.sampling.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * (self.num_prompt - 1) if wants_prompt_logprobs else None
        )
        """For prompt tokens 1, 2, ... as they are computed; None once they have been delivered, or were not asked for."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.arrived = request.arrival_time
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Length, placeholders included."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def decoding(self) -> bool:
        """True past prefill. The one-token last chunk of a prompt is prefill."""
        return self.num_computed >= self.prefill_len

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.arrived, self.scheduled_at, self.first_token_at, self.finished_at)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}[{self.index}], {self.status.value}, "
            f"{self.num_prompt}+{self.num_outputs} tokens, {self.num_computed} computed)"
        )


@dataclasses.dataclass(slots=True)
class SequenceUpdate:
    """What one collected step changed about one sequence."""

    seq: Sequence
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """New output tokens, the one that stops the sequence included."""
    logprobs: list[TokenLogprobs] | None = None
    """An entry a token of ``token_ids``, if they were asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt tokens 1, 2, ... (none for token 0); once, for the request's first sample, when all are known."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """With finish_reason "error": why."""
