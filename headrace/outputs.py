"""Outputs: deltas between processes, accumulated outputs for callers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """Log-probability of one token at one position; ``rank`` counts from 1 (the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""token id -> Logprob: the token at this position and the most likely ones that were asked for."""
TokenText = Callable[[int], str]


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Reason why one sequence cannot go on."""

    message: str
    client: bool = False
    """The request asks for what cannot be: the client's fault (HTTP 400), not the engine's (500)."""
    code: str | None = None
    """Kind of mistake, with ``client``."""
    param: str | None = None
    """Parameter at fault, with ``client``."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Logprobs of one position as the runner returns them.

    ``token_ids[0]`` is the token at the position, of rank ``rank``; the rest are the best tokens, of ranks 1, 2, ...
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    sampled_from: bytes | None = None
    """Ascending ids, little-endian int32, of the tokens that were left to sample from. Empty: all; None: not requested."""

    @property
    def sampling_mask(self) -> list[int] | None:
        """``sampled_from`` as numbers; None: all tokens."""
        if not self.sampled_from:
            return None
        ids = array("i")
        ids.frombytes(self.sampled_from)
        return ids.tolist()


def position_logprobs(entry: TokenLogprobs, text: TokenText | None = None) -> PositionLogprobs:
    """The token at a position first, then the most likely ones; ``text`` decodes a token."""
    first, *best = entry.token_ids
    found = {first: Logprob(entry.logprobs[0], entry.rank, text and text(first))}
    for rank, (token, logprob) in enumerate(zip(best, entry.logprobs[1:], strict=True), start=1):
        if token != first:
            found[token] = Logprob(logprob, rank, text and text(token))
    return found


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens ``[start, end)`` of one sample that were sampled from the logits of one version of the weights."""

    version: str
    start: int
    end: int

    @property
    def json(self) -> dict[str, str | int]:
        return {"version": self.version, "start": self.start, "end": self.end}


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """Marks of a request's life, in seconds of ``time.monotonic()`` on the engine's host, and what delayed it."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    waited_for: str = ""
    """Resource that put its first step off: slots, blocks (of KV), tokens (of a step), or preparation (of its constraint, or
    of an adapter's place). Empty: nothing did."""
    num_preemptions: int = 0
    """Times that an earlier sequence took its KV blocks, so that it was computed again."""


class AttentionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of how one prompt attended."""

    mode: str
    """elastic, xattn, mean, or dense."""
    density: float | None = 1.0
    """Share of dense attention's pairs of query and key blocks that were attended, over the heads of all layers that can attend
    sparsely and the tokens that were computed; None: none were."""
    computed: int = 0
    """Pairs of query and key blocks that dense attention has for one head in these tokens."""
    block: int = 0
    """Tokens of a block."""
    threshold: float | None = None
    exact: bool = True
    """The router saw the prompt as a whole; false: in segments."""
    layers: list[float | None] = []
    """Density of each layer; None: the layer is dense."""
    head_types: list[list[list[str]]] = []
    """Kinds of heads by segment, layer and KV head, as the router decided: full, xattn or streaming."""


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of what a prompt found in the prefix cache of a model with state layers."""

    attention: int
    """Tokens whose KV was found."""
    reused: int
    """Tokens that were not computed: those up to the last snapshot of the states within ``attention``."""
    points: list[int]
    """Numbers of tokens after which snapshots of the states are taken while the prompt is computed."""
    why: str
    """Reason for which fewer tokens were reused than found; empty: none were."""


class ExpertLayers(msgspec.Struct, array_like=True, frozen=True):
    """Shape of recorded choices of experts."""

    layers: list[int]
    """Layers that have experts, ascending."""
    num_layers: int
    """Layers of the model, with those that have none."""
    top_k: int
    wide: bool
    """A number has 16 bits, not 8."""
    weighted: bool = False
    """The weights of experts are recorded too."""

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.top_k * (2 if self.wide else 1)

    @property
    def weight_bytes(self) -> int:
        return len(self.layers) * self.top_k * 4


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True):
    """Experts that the routers chose for the first tokens of a sequence, prompt included."""

    data: bytes
    """``[tokens, layers with experts, top_k]``: ids in the router's order, uint8 or little-endian uint16."""
    shape: ExpertLayers
    weights: bytes = b""
    """The same of weights by which the experts' results are multiplied, little-endian float32, where they are recorded."""


EventKind = Literal["reasoning", "content", "call_started", "arguments", "call_ended"]


class Event(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True, gc=False):
    """An addition to a parsed answer. Events of one call are not interleaved with another's."""

    kind: EventKind
    text: str = ""
    """Text of reasoning, content or arguments. The arguments of a call add up to JSON text."""
    index: int = 0
    """Number of the call within the sample."""
    tokens: int = 0
    """Tokens that reasoning took, markers included."""
    name: str = ""
    """Name of the function, with ``call_started``."""
    id: str = ""
    """Identifier of the call, with ``call_started``."""


class Call(msgspec.Struct):
    """One tool call. ``arguments`` is JSON text, and valid JSON if the call ``ended``."""

    id: str
    name: str
    arguments: str = ""
    ended: bool = False


class Message(msgspec.Struct):
    """Sum of the events of one sample: a non-streaming answer is the folded stream."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = []
    reasoning_tokens: int = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event.kind:
                case "content":
                    self.content += event.text
                case "reasoning":
                    self.reasoning += event.text
                    self.reasoning_tokens += event.tokens
                case "call_started":
                    self.calls.append(Call(event.id, event.name))
                case "arguments":
                    self.calls[event.index].arguments += event.text
                case "call_ended":
                    self.calls[event.index].ended = True


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Additions to one sequence in one step. ``index`` identifies the sample within its request.

    Tokens of logprobs are not decoded: the reader of the delta does so, if it shows them.
    """

    request_id: str
    index: int = 0
    text: str = ""
    """Empty where the answer is parsed: ``events`` has its text."""
    events: list[Event] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """An entry for each token of ``token_ids``."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Logprobs of the prompt, sent once, with the first delta of index 0. The first entry is None: nothing precedes the first
    token."""
    num_cached_tokens: int | None = None
    """Cached tokens of the prompt, sent with the first delta of index 0 and with its last: a preemption may lose some."""
    cache: PrefixReport | None = None
    """Report of the prefix cache, sent with ``num_cached_tokens``; None: the model has no state layers."""
    pooled: bytes | None = None
    """Little-endian float32 numbers of a prompt that was pooled, with its only delta."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or string that stopped the sequence; None for end of sequence and for length."""
    error: str | None = None
    client_error: bool = False
    """``Failure.client`` of ``error``."""
    error_code: str | None = None
    error_param: str | None = None
    """``Failure.code`` and ``Failure.param`` of ``error``."""
    engine_died: bool = False
    """``error`` is the engine's end: the request may be sent again."""
    times: RequestTimes | None = None
    """Times of the request, with the delta that finishes the sequence."""
    attention: AttentionReport | None = None
    """Report of the prompt's attention, with the delta that finishes the sequence, if the prompt attended sparsely."""
    weight_versions: list[WeightSpan] = []
    """Versions of the weights that the sample's tokens come from, with the delta that finishes the sequence."""
    routed_experts: RoutedExperts | None = None
    """Choices for all tokens but the last, with the delta that finishes the sequence, if they were requested."""

    @property
    def is_large(self) -> bool:
        """Whether shaping the delta takes longer than an event loop may."""
        return self.prompt_logprobs is not None or self.routed_experts is not None

    def continues(self, earlier: OutputDelta) -> bool:
        """Whether this delta can be read as one with ``earlier``, the one before it: of the same sample, no error, and without
        logprobs, which belong to the part of the answer that their token is in."""
        return (
            self.index == earlier.index
            and self.request_id == earlier.request_id
            and earlier.finish_reason is None
            and self.finish_reason in _MERGEABLE
            and self.logprobs is earlier.logprobs is None
            and self.prompt_logprobs is earlier.prompt_logprobs is None
        )


_MERGEABLE = frozenset({None, "stop", "length"})


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """One delta that says what those of one sample say, each of which continues the one before it."""
    if len(deltas) == 1:
        return deltas[0]
    events: list[Event] = []
    for event in (event for delta in deltas for event in delta.events):
        if events and event.kind in _JOINED and (before := events[-1]).kind == event.kind and before.index == event.index:
            events[-1] = Event(event.kind, before.text + event.text, event.index, before.tokens + event.tokens)
        else:
            events.append(event)
    return msgspec.structs.replace(
        deltas[-1],
        text="".join([delta.text for delta in deltas]),
        events=events,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        num_cached_tokens=next((n for delta in reversed(deltas) if (n := delta.num_cached_tokens) is not None), None),
        cache=next((report for delta in reversed(deltas) if (report := delta.cache) is not None), None),
    )


_JOINED = frozenset({"reasoning", "content", "arguments"})
"""Kinds of events whose texts add up."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One finished (or so far generated) sample."""

    index: int
    text: str = ""
    """Text of the output; of a parsed answer, its content."""
    message: Message | None = None
    """The answer parsed into reasoning, content and tool calls; None: it is not parsed."""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    sampling_mask: list[list[int] | None] = []
    """With ``return_sampling_mask``, the ids of the tokens that each output token was sampled from; None: all of them."""
    routed_experts: RoutedExperts | None = None
    """With ``return_routed_experts``, the choices for all tokens but the last; None: the sample has not finished."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] = []
    """Versions of the weights that the tokens come from, once the sample has finished."""


def most_computed(first: AttentionReport | None, second: AttentionReport | None) -> AttentionReport | None:
    """Returns the report of the sample that computed more of the prompt that two samples share."""
    if first is None or second is None:
        return first or second
    return second if second.computed > first.computed else first


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request with its samples, in order of ``index``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = []
    finished: bool = False
    num_cached_tokens: int = 0
    cache: PrefixReport | None = None
    """Report of what was found in the prefix cache; None: the model has no state layers."""
    error: str | None = None
    engine_died: bool = False
    """The engine process died: ``OutputDelta.engine_died``."""
    times: RequestTimes | None = None
    attention: AttentionReport | None = None
    """Report of the prompt's attention; None: it attended densely, or the request has not finished."""
    pooled: bytes | None = None
    """``OutputDelta.pooled`` of a prompt that was pooled."""

    def add(self, delta: OutputDelta, text: TokenText | None = None) -> None:
        """Fold one delta in; ``outputs[delta.index]`` must exist. ``text`` decodes the tokens of logprobs."""
        sample = self.outputs[delta.index]
        sample.text += delta.text
        if delta.events:
            sample.message = sample.message or Message()
            sample.message.add(delta.events)
            sample.text = sample.message.content
        sample.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            sample.sampling_mask += [entry.sampling_mask for entry in delta.logprobs if entry.sampled_from is not None]
            if sample.logprobs is None:
                sample.logprobs, sample.cumulative_logprob = [], 0.0
            sample.logprobs.extend(position_logprobs(entry, text) for entry in delta.logprobs)
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(entry.logprobs[0] for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if entry is None else position_logprobs(entry, text) for entry in delta.prompt_logprobs
            ]
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
            self.cache = delta.cache
        if delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
            sample.routed_experts = delta.routed_experts
            sample.weight_versions = delta.weight_versions
            self.error = delta.error or self.error
            self.engine_died = delta.engine_died or self.engine_died
            self.pooled = delta.pooled
            self.times = delta.times or self.times
            self.attention = most_computed(self.attention, delta.attention)
            self.finished = all(output.finish_reason is not None for output in self.outputs)


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float


class ClassificationOutput(msgspec.Struct, frozen=True):
    probs: list[float]
    """Probability of each class."""


class PoolingOutput(msgspec.Struct, frozen=True):
    data: list[float]
    """The pooled numbers as the engine computes them: not normalised, not cut, no function applied."""


T = TypeVar("T", EmbeddingOutput, ScoringOutput, ClassificationOutput, PoolingOutput)


class PoolingRequestOutput(msgspec.Struct, Generic[T], kw_only=True):
    """The result of one prompt, or of one pair of texts."""

    request_id: str
    outputs: T | None
    """None: it failed, as ``error`` says. Other prompts of the call are not affected."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    error: str | None = None
    finished: bool = True
