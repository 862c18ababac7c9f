"""Random requests with every sampling feature, and what their answers must obey whatever was drawn."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Literal

from support.models.tiny_llama import EOS, VOCAB

from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

Fate = Literal["served", "left", "aborted", "refused"]
LETTERS = "abcdefgh "
LONGEST_PROMPT, LONGEST_OUTPUT = 60, 24
MAX_LEN = 128


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    priority: int
    fate: Fate
    patience: int
    """Tokens after which a client leaves, or aborts."""


class Traffic:
    """Requests in an order that the seed settles. Every third season, of so many requests, is plain: nothing but a
    temperature is asked for, so that steps are launched as graphs."""

    def __init__(self, seed: int, season: int) -> None:
        self._rng = random.Random(seed)
        self._season = season
        self._count = 0
        self._prefixes = [self._tokens(40) for _ in range(4)]

    def next(self) -> Asked:
        rng = self._rng
        fate: Fate = rng.choices(("served", "left", "aborted", "refused"), (86, 6, 5, 3))[0]
        prompt = self._tokens(rng.randint(1, LONGEST_PROMPT))
        if rng.random() < 0.25:
            prompt = rng.choice(self._prefixes) + prompt[: rng.randint(1, 20)]
        if fate == "refused":
            prompt = rng.choice(([*prompt, VOCAB + 5], self._tokens(MAX_LEN + 1), []))
        return Asked(prompt, SamplingParams(**self.sampling()), rng.randint(0, 2), fate, rng.randint(1, 8))

    def sampling(self) -> dict[str, Any]:
        """Each feature by its own chance: most requests have several."""
        chosen: dict[str, Any] = {"max_tokens": self._rng.randint(1, LONGEST_OUTPUT), "temperature": 0.0}
        self._count += 1
        plain = self._count // self._season % 3 == 2
        for chance, draw in self._features()[: 1 if plain else None]:
            if self._rng.random() < chance:
                chosen |= draw()
        chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
        if "stop" in chosen:
            chosen.pop("detokenize", None)
        return chosen

    def _features(self) -> list[tuple[float, Callable[[], dict[str, Any]]]]:
        rng = self._rng
        return [
            (0.7, lambda: {"temperature": rng.uniform(0.2, 1.6)}),
            (0.3, lambda: {"top_k": rng.randint(1, 60)}),
            (0.3, lambda: {"top_p": rng.uniform(0.3, 1.0)}),
            (0.2, lambda: {"min_p": rng.uniform(0.0, 0.2)}),
            (0.4, lambda: {"seed": rng.randint(-(2**40), 2**40)}),
            (0.2, lambda: {"repetition_penalty": rng.uniform(0.7, 2.0)}),
            (0.2, lambda: {"presence_penalty": rng.uniform(-2.0, 2.0)}),
            (0.2, lambda: {"frequency_penalty": rng.uniform(-2.0, 2.0)}),
            (0.15, lambda: {"logit_bias": {token: rng.uniform(-50.0, 5.0) for token in self._tokens(rng.randint(1, 8))}}),
            (0.1, lambda: {"allowed_token_ids": sorted({*self._tokens(rng.randint(1, 40)), EOS})}),
            (0.15, lambda: {"bad_words": [self._word() for _ in range(rng.randint(1, 4))]}),
            (0.15, lambda: {"stop": [self._word() for _ in range(rng.randint(1, 3))]}),
            (0.1, lambda: {"include_stop_str_in_output": True}),
            (0.15, lambda: {"stop_token_ids": self._tokens(rng.randint(1, 6))}),
            (0.15, lambda: {"min_tokens": rng.randint(0, LONGEST_OUTPUT)}),
            (0.3, lambda: {"ignore_eos": True}),
            (0.2, lambda: {"logprobs": rng.randint(0, 5), "logprobs_mode": rng.choice(("raw", "processed"))}),
            (0.1, lambda: {"prompt_logprobs": rng.randint(0, 3)}),
            (0.1, lambda: {"n": rng.randint(2, 3)}),
            (0.1, lambda: {"skip_special_tokens": False}),
            (0.1, lambda: {"detokenize": False}),
        ]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(count)]

    def _word(self) -> str:
        return "".join(self._rng.choices(LETTERS.strip(), k=self._rng.randint(1, 3)))


def check(asked: Asked, output: RequestOutput) -> None:
    """Checks the properties of every answer that was not cut short."""
    params = asked.params
    assert output.finished and output.error is None, output.error
    assert len(output.outputs) == params.n
    for sample in output.outputs:
        tokens, limit = sample.token_ids, params.max_tokens or 0
        assert sample.finish_reason in ("stop", "length"), sample.finish_reason
        assert len(tokens) <= limit and (sample.finish_reason == "stop" or len(tokens) == limit)
        assert 0 <= min(tokens) <= max(tokens) < VOCAB
        assert len(tokens) >= params.min_tokens or isinstance(sample.stop_reason, str)
        if params.allowed_token_ids is not None:
            assert set(tokens) <= set(params.allowed_token_ids)
        if params.logprobs is not None:
            assert len(sample.logprobs or []) == len(tokens)
        if params.bad_words and params.detokenize:
            assert not any(word in sample.text for word in params.bad_words)
        if params.stop and not params.include_stop_str_in_output and params.min_tokens == 0:
            assert not any(word in sample.text for word in params.stop)
        if params.ignore_eos and not params.stop_token_ids and not params.stop:
            assert sample.finish_reason == "length"
    if params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs or []) == len(asked.prompt)
