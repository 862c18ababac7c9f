"""What a caller may ask of sampling. Field names follow vLLM's."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from headrace.errors import RequestError

LogprobsMode = Literal["raw", "processed"]
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request. Immutable; checked when it is made.

    Raises:
        RequestError: a value is out of range; the error names the field.
    """

    n: int = 1
    """Independent samples of the prompt; they share its KV blocks."""
    temperature: float = 1.0
    """0 means argmax."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    """Over tokens of prompt and output: a seen token's logit is divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Strings that never appear in the emitted text, however they are tokenised."""
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    """None: until the context is full."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many best tokens to report at each step beside the sampled one; -1: the whole vocabulary."""
    logprobs_mode: LogprobsMode = "raw"
    """raw: of the model's logits. processed: of the distribution actually drawn from."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.integer("n", low=1)
        check.number("temperature", low=0.0)
        check.number("top_p", low=0.0, high=1.0, low_open=True)
        check.integer("top_k", low=-1)
        check.number("min_p", low=0.0, high=1.0)
        check.integer("seed", low=-MAX_SEED - 1, high=MAX_SEED)
        check.number("repetition_penalty", low=0.0, low_open=True)
        check.number("presence_penalty", low=-2.0, high=2.0)
        check.number("frequency_penalty", low=-2.0, high=2.0)
        check.integer("min_tokens", low=0)
        check.integer("max_tokens", low=1)
        check.integer("logprobs", low=-1)
        check.integer("prompt_logprobs", low=-1)
        check.strings("bad_words")
        check.strings("stop")
        check.token_ids("allowed_token_ids", allow_empty=False)
        check.token_ids("stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", "min_tokens")
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError(f"logprobs_mode must be 'raw' or 'processed', not {self.logprobs_mode!r}", "logprobs_mode")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=true", "stop")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not math.isfinite(bias) or abs(bias) > 100:
                raise RequestError(f"logit_bias of token {token} must be a number in [-100, 100], not {bias!r}", "logit_bias")
            if not isinstance(token, int) or token < 0:
                raise RequestError(f"logit_bias has the key {token!r}: keys are token ids", "logit_bias")

    @property
    def greedy(self) -> bool:
        """True when the draw is an argmax and needs no random number."""
        return self.temperature == 0.0 or self.top_k == 1


class _Checker:
    """Range checks that name the field."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def number(self, name: str, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
        value = getattr(self._params, name)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or value > high or value < low or (low_open and value == low):
            left = "(" if low_open else "["
            right = f"{high}]" if math.isfinite(high) else "inf)"
            raise RequestError(f"{name} must be a number in {left}{low}, {right}, not {value!r}", name)

    def integer(self, name: str, *, low: int, high: int | None = None) -> None:
        value = getattr(self._params, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise RequestError(f"{name} must be an integer of at least {low}{upper}, not {value!r}", name)

    def strings(self, name: str) -> None:
        value = getattr(self._params, name)
        if value is None:
            return
        if not isinstance(value, list) or not all(isinstance(s, str) and s for s in value):
            raise RequestError(f"{name} must be a list of non-empty strings", name)

    def token_ids(self, name: str, *, allow_empty: bool = True) -> None:
        value = getattr(self._params, name)
        if value is None:
            return
        if not isinstance(value, list) or not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value):
            raise RequestError(f"{name} must be a list of token ids", name)
        if not value and not allow_empty:
            raise RequestError(f"{name} must not be empty", name)
