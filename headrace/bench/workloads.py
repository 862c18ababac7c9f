"""Workloads by name: prompts as token ids, and how many tokens to generate for each. The same on every run and machine.

Random workloads represent lengths only. Two engines' rows are comparable because the random numbers repeat, so the order in
which they are generated is part of the definition.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.bench.texts import CHAT_PROMPTS, PROSE, SYSTEM_PROMPT
from headrace.errors import ConfigError

FIRST_TOKEN, LAST_TOKEN = 100, 150_000
"""Range of the token ids of random prompts, both ends included."""


class Encoder(Protocol):
    """The tokenizer interface of text workloads."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]], /) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Workload:
    """``prompts[i]`` is to be followed by exactly ``output_lens[i]`` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    def folded(self, vocab_size: int) -> Workload:
        """The same lengths with every id inside a smaller vocabulary."""
        prompts = [[token % vocab_size for token in prompt] for prompt in self.prompts]
        return dataclasses.replace(self, prompts=prompts)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def random_tokens(name: str, seed: int, batch: int, prompt_len: int, output_len: int) -> Workload:
    """``batch`` prompts of random tokens, all of one length."""
    rng = random.Random(seed)
    return Workload(name, [_tokens(rng, prompt_len) for _ in range(batch)], [output_len] * batch)


def _mixed256() -> Workload:
    """256 requests of 100 to 1024 tokens in and 100 to 1024 out: all lengths are sampled before any token."""
    rng = random.Random(0)
    inputs = [rng.randint(100, 1024) for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return Workload("mixed256", [_tokens(rng, length) for length in inputs], outputs)


_UNIFORM = {
    "single": (1, 1, 128, 256),
    "batch8": (2, 8, 256, 256),
    "batch64": (3, 64, 256, 256),
    "prefill8k": (4, 16, 8192, 1),
    "longctx_decode": (8, 16, 16384, 128),
    "prefill32k": (5, 1, 32768, 1),
    "prefill64k": (6, 1, 65536, 1),
    "prefill128k": (7, 1, 131072, 1),
}
"""name -> seed, requests, tokens in, tokens out."""

RANDOM_WORKLOADS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(random_tokens, name, *shape) for name, shape in _UNIFORM.items()
}
RANDOM_WORKLOADS["mixed256"] = _mixed256


def chat(encoder: Encoder) -> Workload:
    """Single questions through the model's chat template, 128 tokens of answer each."""
    prompts = [encoder.encode_chat([{"role": "user", "content": text}]) for text in CHAT_PROMPTS]
    return Workload("chat", prompts, [128] * len(prompts))


def chat_shared(encoder: Encoder) -> Workload:
    """The same questions behind one long system message: what prefix caching is for."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    prompts = [encoder.encode_chat([system, {"role": "user", "content": text}]) for text in CHAT_PROMPTS]
    return Workload("chat_shared", prompts, [64] * len(prompts))


TEXT_WORKLOADS: dict[str, Callable[[Encoder], Workload]] = {"chat": chat, "chat_shared": chat_shared}


def prose(encoder: Encoder, name: str, batch: int, prompt_len: int, output_len: int) -> Workload:
    """``batch`` prompts of exactly ``prompt_len`` tokens of English, no two with a common beginning."""
    stream = encoder.encode(PROSE, add_special_tokens=False)
    # Each prompt starts elsewhere in the text, which goes round where it is too short.
    starts = [index * len(stream) // batch for index in range(batch)]
    prompts = [[stream[(start + offset) % len(stream)] for offset in range(prompt_len)] for start in starts]
    return Workload(name, prompts, [output_len] * batch)


def build(name: str, encoder: Encoder | None) -> Workload:
    """The workload of that name.

    Raises:
        ConfigError: there is none, or it needs a tokenizer and there is none.
    """
    if name in RANDOM_WORKLOADS:
        return RANDOM_WORKLOADS[name]()
    if name not in TEXT_WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(names())}", "--workload")
    if encoder is None:
        raise ConfigError(f"the workload {name} is made of text and needs a tokenizer", "--workload")
    return TEXT_WORKLOADS[name](encoder)


def names() -> Sequence[str]:
    return [*RANDOM_WORKLOADS, *TEXT_WORKLOADS]
