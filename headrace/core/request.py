"""Request: what the user asked. Immutable, and complete: the engine needs nothing else to serve it."""

from __future__ import annotations

import msgspec

from headrace.sampling_params import SamplingParams


class BadWordsTable(msgspec.Struct, frozen=True, array_like=True):
    """The bad words of a request, compiled to a byte automaton (Aho-Corasick) over the emitted text.

    State 0 is the start. After a token whose text is the bytes ``b``, the state is folded over ``b`` by
    ``transitions``; a token that would complete a bad word is banned in the state before it.
    """

    num_states: int
    transitions: bytes
    """``[num_states, 256]`` little-endian int16: state after a byte."""
    always: list[int]
    """Tokens whose own text contains a bad word: banned in every state."""
    by_state: list[list[int]]
    """Per state, the further tokens banned there."""
    special_text: bool
    """True: special tokens emit their text (``skip_special_tokens=False``). False: they emit nothing."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, tokenised and checked."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """``sampling.max_tokens``, or what is left of the context."""
    seed: int
    """The request's own seed, or one the engine drew for it. Samples of one request differ by their index."""
    eos_token_ids: list[int] = []
    """End the sequence unless ``sampling.ignore_eos``; banned until ``sampling.min_tokens``."""
    bad_words: BadWordsTable | None = None
    prompt: str | None = None
    priority: int = 0
    """Lower runs first under the priority policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    spans: list[tuple[int, int]] = []
    """Token ranges ``[start, end)`` of the prompt that chunks never cut; ascending, disjoint."""
    arrival_time: float = 0.0
    """``time.monotonic()`` on the engine's host."""
