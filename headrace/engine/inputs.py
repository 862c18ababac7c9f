"""InputProcessor: from a prompt and sampling parameters to a checked Request."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import msgspec

from headrace.config import SamplingLimits
from headrace.core.request import BadWordsTable, Request
from headrace.errors import ConfigError, RequestError
from headrace.sampling_params import MAX_SEED, SamplingParams
from headrace.text.bad_words import check_bad_words, compile_bad_words
from headrace.text.stops import check_stops

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text that the tokens were made of, to be told with the output."""


class TextPrompt(TypedDict):
    prompt: str


Prompt = str | TokensPrompt | TextPrompt

MAX_SAMPLES = 128
"""Most samples of one request."""
_MAX_REQUEST_ID = 256
_MAX_STRING = 4096
_BAD_WORDS_CACHED = 32
_INT64 = 2**63
_GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class InputProcessor:
    """Makes Requests of one engine. Holds no state of any request; may be used from several threads."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        limits: SamplingLimits,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        seed: int,
    ) -> None:
        """``generation_config``: as in ``ModelFiles``.

        Raises:
            ConfigError: the model's generation config holds a value that no request may have.
        """
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.default_sampling = _sampling_defaults(generation_config)
        """What a caller who gives no sampling parameters gets."""
        own = tokenizer.eos_token_ids if tokenizer is not None else []
        self.eos_token_ids = sorted({*own, *generation_config.get("eos_token_id", ())})
        """Every token that ends a sequence of this model."""
        self._limits = limits
        self._seeds = random.Random(seed)
        self._bad_words: OrderedDict[tuple[tuple[str, ...], bool], BadWordsTable] = OrderedDict()
        pieces = tokenizer.token_bytes.pieces if tokenizer is not None else ()
        self._longest_piece = max((len(piece) for piece in pieces), default=1)

    def default_sampling_params(self) -> SamplingParams:
        return self.default_sampling

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> Request:
        """Tokenises and checks.

        Raises:
            RequestError: the request cannot be served as asked; the error names the parameter.
        """
        text, tokens = self._tokens(prompt)
        self._check_sampling(params)
        if not _is_text(request_id) or not 0 < len(request_id) <= _MAX_REQUEST_ID:
            raise RequestError(f"request_id must be a string of 1 to {_MAX_REQUEST_ID} characters", "request_id")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -_INT64 <= priority < _INT64:
            raise RequestError(f"priority must be a 64-bit integer, not {priority!r}", "priority")
        if cache_salt is not None and (not _is_text(cache_salt) or not cache_salt):
            raise RequestError("cache_salt must be a string that is not empty", "cache_salt")
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling=params,
            max_tokens=self._max_tokens(len(tokens), params),
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            eos_token_ids=self.eos_token_ids,
            bad_words=self._compiled_bad_words(params),
            prompt=text,
            priority=priority,
            cache_salt=cache_salt,
            spans=_checked_spans(spans, len(tokens)),
            arrival_time=time.monotonic(),
        )

    # The prompt

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text where there is one, and its tokens."""
        if isinstance(prompt, str):
            return prompt, self._checked_tokens(self._encode(prompt))
        if not isinstance(prompt, dict):
            raise RequestError(f"a prompt is a string or a dict, not a {type(prompt).__name__}", "prompt")
        unknown = sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids"}))
        if unknown:
            raise RequestError(f"a prompt has no part named {unknown[0]!r}", "prompt")
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not _is_text(text):
            raise RequestError("prompt must be a string that UTF-8 can hold", "prompt")
        if tokens is None:
            if text is None:
                raise RequestError("a prompt needs 'prompt' or 'prompt_token_ids'", "prompt")
            return text, self._checked_tokens(self._encode(text))
        if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
            raise RequestError("prompt_token_ids must be a list of token ids", "prompt_token_ids")
        return text, self._checked_tokens(tokens)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids", "prompt")
        if len(text) > self.max_model_len * self._longest_piece:
            raise RequestError(
                f"the prompt's {len(text)} characters cannot fit in a context of {self.max_model_len} tokens", "prompt"
            )
        return self.tokenizer.encode(text)

    def _checked_tokens(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise RequestError("the prompt is empty", "prompt")
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with a context of {self.max_model_len} it may have at most "
                f"{self.max_model_len - 1}, so that one more can follow",
                "prompt",
            )
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"token id {wrong} is not in the vocabulary, which has {self.vocab_size} tokens", "prompt")
        return tokens

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """What the request may generate: as asked, or the rest of the context."""
        rest = self.max_model_len - num_prompt
        if params.max_tokens is not None and params.max_tokens > rest:
            raise RequestError(
                f"{num_prompt} tokens of prompt and max_tokens {params.max_tokens} make "
                f"{num_prompt + params.max_tokens}, and the context is {self.max_model_len}",
                "max_tokens",
            )
        if params.min_tokens > rest:
            raise RequestError(
                f"{num_prompt} tokens of prompt leave room for {rest}, and min_tokens is {params.min_tokens}", "min_tokens"
            )
        return rest if params.max_tokens is None else params.max_tokens

    # The sampling parameters

    def _check_sampling(self, params: SamplingParams) -> None:
        if params.n > MAX_SAMPLES:
            raise RequestError(f"n is {params.n}, and at most {MAX_SAMPLES} samples may share a request", "n")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("stop_token_ids", params.stop_token_ids or ())
        self._check_vocabulary("logit_bias", params.logit_bias or ())
        if params.stop:
            check_stops(params.stop, self._tokenizer_for("stop", params.stop), self._limits)
        if params.bad_words:
            check_bad_words(params.bad_words, self._tokenizer_for("bad_words", params.bad_words), self._limits)

    def _check_logprobs(self, name: str, count: int | None) -> None:
        limit = self._limits.max_logprobs
        if count is None or limit == -1:
            return
        asked = self.vocab_size if count == -1 else count
        if asked > limit:
            what = "the whole vocabulary" if count == -1 else str(count)
            raise RequestError(f"{name} asks for {what}, and this engine gives at most {limit} (max_logprobs)", name)

    def _check_vocabulary(self, name: str, tokens: Sequence[int] | Mapping[int, float]) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise RequestError(
                f"{name}: token id {max(tokens)} is not in the vocabulary, which has {self.vocab_size} tokens", name
            )

    def _tokenizer_for(self, name: str, strings: Sequence[str]) -> Tokenizer:
        """Who counts the tokens of ``strings``. What is absurdly long is refused uncounted."""
        if self.tokenizer is None:
            raise RequestError(f"{name} needs a tokenizer, and this engine has none (skip_tokenizer_init)", name)
        longest = max(map(len, strings))
        if longest > _MAX_STRING:
            raise RequestError(f"{name} has a string of {longest} characters; at most {_MAX_STRING} are allowed", name)
        return self.tokenizer

    def _compiled_bad_words(self, params: SamplingParams) -> BadWordsTable | None:
        """The request's automaton. Compiling reads the whole vocabulary, so that recent ones are kept."""
        if not params.bad_words or self.tokenizer is None:
            return None
        special_text = not params.skip_special_tokens
        key = (tuple(params.bad_words), special_text)
        table = self._bad_words.get(key)
        if table is None:
            table = compile_bad_words(params.bad_words, self.tokenizer.token_bytes, special_text=special_text)
            self._bad_words[key] = table
            while len(self._bad_words) > _BAD_WORDS_CACHED:
                self._bad_words.popitem(last=False)
        return table


def _is_text(value: object) -> bool:
    """A string that can be sent: JSON may bring lone surrogates, which UTF-8 cannot hold."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_spans(spans: Sequence[tuple[int, int]], num_prompt: int) -> list[tuple[int, int]]:
    end = 0
    for span in spans:
        if len(span) != 2 or not end <= span[0] < span[1] <= num_prompt:
            raise RequestError(
                f"spans must be ascending, disjoint ranges [start, end) inside the prompt of {num_prompt} tokens, "
                f"and {tuple(span)} is not",
                "spans",
            )
        end = span[1]
    return [(start, end) for start, end in spans]


def _sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    fields = {name: value for name in _GENERATION_DEFAULTS if (value := generation_config.get(name)) is not None}
    try:
        return msgspec.convert(fields, SamplingParams)
    except (RequestError, msgspec.ValidationError) as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error
