"""Request: a tokenised and validated request. Immutable and complete: the engine needs nothing else to serve it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from headrace.core.media import ItemInputs, RopePositions
from headrace.kv import CacheIdentity, Item
from headrace.options import INT64_MAX, OptionSpec, api
from headrace.pooling_params import PoolingParams
from headrace.sampling_params import SamplingParams

_EXTRA = api("vLLM", "chat", "completions", "responses", "inference") | api("headrace", "messages")


class BadWordsTable(msgspec.Struct, frozen=True, array_like=True):
    """The bad words of a request, compiled to a byte automaton (Aho-Corasick) over the emitted text.

    State 0 is the start. Each byte of an emitted token advances the state by ``transitions``; a token that would complete a
    bad word is banned in the state before it.
    """

    num_states: int
    transitions: bytes
    """``[num_states, 256]`` little-endian int16: (state, byte) -> next state."""
    always: list[int]
    """Tokens whose own text contains a bad word: banned in every state."""
    by_state: list[list[int]]
    """Per state, the tokens banned in addition to ``always``."""
    special_text: bool
    """True: special tokens emit their text (``skip_special_tokens=False``). False: they emit nothing."""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Constraint on the outputs of a request, checked and ready to be compiled."""

    kind: str
    """Parameter it was made of: json, json_object, regex, choice, grammar, structural_tag, tools or thinking_token_budget."""
    grammar: str
    """Grammar in the serialised form of llguidance."""
    guarded: bool = False
    """Whether outputs that repeat themselves end: JSON, wherever they do; others, where they are complete."""
    nbytes: int = 0
    """Memory of the compiled grammar, as far as it is known."""
    seconds: float = 0.0
    """Processor time in which it was checked, which compiling it takes nearly all of."""


class MediaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine that requests with media must fit."""

    model_type: str
    hidden_size: int
    deepstack_layers: int
    bidirectional: bool
    sectioned_rope: bool
    max_position: int
    max_model_len: int
    max_encoder_rows: int
    """Most rows that the encoder makes of one item; 0: the model has no encoder, and prompts bring features."""
    max_step_tokens: int
    """Tokens of a step, which a bidirectional item must fit."""
    dtype: str
    """Dtype to which the encoder rounds its inputs."""


class ParseOptions(msgspec.Struct, frozen=True, array_like=True):
    """Formats by which a request's answer is parsed into reasoning, content and tool calls."""

    tools: str
    """Name of the format of tool calls, or none."""
    reasoning: str
    """Name of the format of reasoning, or none."""
    calls: bool
    """Whether tool calls are looked for."""
    separate_reasoning: bool
    """Whether reasoning is looked for."""
    tail: str = ""
    """The prompt's text from the start of the answer's turn on."""
    types: dict[str, dict[str, list[str]]] = {}
    """tool -> parameter -> the JSON types that its schema allows"""
    parallel: bool = True
    """False: the sequence ends with its first call."""
    stop_in_reasoning: bool = False
    """Stop strings end the sequence in reasoning too, not only in content."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """The adapter that a request runs with."""

    name: str
    """Name by which the request asked for it."""
    digest: str
    """``AdapterFiles.digest``"""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, tokenised and checked."""

    request_id: Annotated[str, OptionSpec(min=1, max=256)]
    """Names the request; unique among those that run."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """``sampling.max_tokens``, or the rest of the context if that is None."""
    seed: int
    """``sampling.seed``, or a random one if that is None. Samples of one request differ by their index."""
    eos_token_ids: list[int] = []
    """End the sequence unless ``sampling.ignore_eos``; banned until ``sampling.min_tokens``."""
    bad_words: BadWordsTable | None = None
    constraint: Constraint | None = None
    prompt: str | None = None
    priority: Annotated[int, OptionSpec(min=-INT64_MAX - 1, max=INT64_MAX, apis=_EXTRA)] = 0
    """A lower value runs first under --policy priority."""
    cache_salt: Annotated[str | None, OptionSpec(min=1, max=256, apis=_EXTRA | api("SGLang", "generate"))] = None
    """Cached prefixes are shared only among requests with the same salt."""
    adapter: AdapterRef | None = None
    """None: the base model."""
    session: str | None = None
    """Requests of one session go to the same replica under --dp-routing-policy session."""
    tenant: str = ""
    """Tenant of the request; empty where the server does not tell its clients apart."""
    parse: ParseOptions | None = None
    """None: the answer is text."""
    pooling: PoolingParams | None = None
    """The prompt is pooled, and nothing is generated; None: tokens are generated."""
    items: tuple[Item, ...] = ()
    """Items of the prompt: ascending, disjoint."""
    media: tuple[ItemInputs, ...] = ()
    """The content of each of ``items``; empty: their features need no input."""
    boundaries: tuple[int, ...] = ()
    """Numbers of tokens, ascending, up to which other prompts are likely to equal this one: ends of turns."""
    rope: RopePositions | None = None
    """None: rotary positions are those of the tokens."""
    arrival_time: float = 0.0
    """``time.monotonic()`` on the engine's host."""

    @property
    def cache_identity(self) -> CacheIdentity:
        adapter = None if self.adapter is None else self.adapter.digest
        return CacheIdentity(cache_salt=self.cache_salt, adapter=adapter, items=self.items)
