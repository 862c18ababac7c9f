"""Workloads by name: prompts as token ids, and how many tokens to generate for each. The same on every run and machine.

Random workloads represent lengths only. Two engines' rows are comparable because the random numbers repeat, so the order in
which they are generated is part of the definition.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.bench.pictures import Pictures
from headrace.bench.texts import CHAT_PROMPTS, PROSE, SYSTEM_PROMPT
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.frontend.inputs import Prompt

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
    pictures: Pictures | None = None
    """Pictures of the prompts; None: the prompts are tokens alone."""
    media: tuple[dict[str, Any], ...] = ()
    """``multi_modal_data`` of each prompt, where ``pictures`` were made."""

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
        """Returns prompts of the same lengths with every id inside a smaller vocabulary."""
        prompts = [[token % vocab_size for token in prompt] for prompt in self.prompts]
        return dataclasses.replace(self, prompts=prompts)

    def marked(self, tokens: Sequence[int]) -> Workload:
        """Returns the workload with a model's placeholder of a picture before each prompt, and other ids below the
        placeholder's."""
        folded = self.folded(min(tokens))
        return dataclasses.replace(folded, prompts=[[*tokens, *prompt] for prompt in folded.prompts])

    def copied(self, count: int) -> Workload:
        """Returns the same requests ``count`` times."""
        if count == 1:
            return self
        return dataclasses.replace(
            self, name=f"{self.name} x{count}", prompts=self.prompts * count, output_lens=self.output_lens * count
        )

    def repetition(self, number: int) -> Workload:
        """Returns the workload with other pictures, where prompts bring any: equal ones would measure caches."""
        if self.pictures is None:
            return self
        count = len(self.prompts)
        media = tuple(self.pictures.media(number * count + index) for index in range(count))
        return dataclasses.replace(self, media=media)

    def requests(self) -> list[Prompt]:
        """Returns the prompts in the form that vLLM's and headrace's ``generate`` take."""
        if self.pictures is None:
            return [{"prompt_token_ids": prompt} for prompt in self.prompts]
        return [
            {"prompt_token_ids": prompt, "multi_modal_data": media}
            for prompt, media in zip(self.prompts, self.media, strict=True)
        ]


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
    "prefill16k": (10, 1, 16384, 1),
    "prefill32k": (5, 1, 32768, 1),
    "prefill64k": (6, 1, 65536, 1),
    "prefill128k": (7, 1, 131072, 1),
}
"""name -> seed, requests, tokens in, tokens out."""

RANDOM_WORKLOADS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(random_tokens, name, *shape) for name, shape in _UNIFORM.items()
}
RANDOM_WORKLOADS["mixed256"] = _mixed256

_PUBLISHED = {
    (128, 128): 30_000,
    (128, 2048): 3000,
    (128, 4096): 1500,
    (500, 2000): 3000,
    (1000, 1000): 3000,
    (1000, 2000): 1500,
    (2048, 128): 3000,
    (2048, 2048): 1500,
    (5000, 500): 1500,
    (20_000, 2000): 1000,
}
"""(tokens in, tokens out) -> requests, as in the performance overview of TensorRT-LLM 1.0."""

PUBLISHED_WORKLOADS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(random_tokens, name, 11 + index, count, *lengths)
    for index, (lengths, count) in enumerate(_PUBLISHED.items())
    for name in ("isl{}-osl{}".format(*lengths),)
}
"""Workloads of rates that others publish. They fill a large GPU for minutes, so that ``all`` leaves them out."""


def _pictures64(name: str, pictures: Pictures | None) -> Workload:
    """64 requests of 256 tokens in, beside a picture, and 128 out."""
    return dataclasses.replace(random_tokens(name, 9, 64, 256, 128), pictures=pictures)


PICTURE_WORKLOADS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(_pictures64, name, pictures)
    for name, pictures in {
        "images64": Pictures(1024, 1024),
        "images64_features": Pictures(1024, 1024, encoded=True),
        "images64_text": None,
    }.items()
}
"""Workloads of the same prompts with pictures, with features that were encoded before, and without either."""


def placeholder(config: Mapping[str, Any]) -> list[int]:
    """The tokens that stand for a picture in prompts of a model.

    Args:
        config: of the model's ``config.json``.

    Raises:
        ConfigError: the model reads no pictures, or marks them in another way.
    """
    if config.get("image_token_id") is None:
        raise ConfigError("the workload has pictures, and the model's config has no image_token_id", "--workload")
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    return [config[name] for name in names if config.get(name) is not None]


def chat(encoder: Encoder) -> Workload:
    """Single questions through the model's chat template, 128 tokens of answer each."""
    prompts = [encoder.encode_chat([{"role": "user", "content": text}]) for text in CHAT_PROMPTS]
    return Workload("chat", prompts, [128] * len(prompts))


def chat_shared(encoder: Encoder) -> Workload:
    """Makes a workload of the same questions behind one long system message: the case for prefix caching."""
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
    plain = RANDOM_WORKLOADS | PUBLISHED_WORKLOADS | PICTURE_WORKLOADS
    if name in plain:
        return plain[name]()
    if name not in TEXT_WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(names())}", "--workload")
    if encoder is None:
        raise ConfigError(f"the workload {name} is made of text and needs a tokenizer", "--workload")
    return TEXT_WORKLOADS[name](encoder)


def names() -> Sequence[str]:
    return [*RANDOM_WORKLOADS, *PUBLISHED_WORKLOADS, *PICTURE_WORKLOADS, *TEXT_WORKLOADS]
