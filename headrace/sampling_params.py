"""SamplingParams: the declaration of what a request may ask of sampling. Field names follow vLLM's."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any, Literal

import msgspec

from headrace.errors import RequestError
from headrace.options import FLOAT32_MAX, FLOAT32_TINY, INT32_MAX, INT64_MAX, CheckedStructType, OptionSpec, api, check

LogprobsMode = Literal["raw", "processed"]
MAX_SEED = INT64_MAX
MAX_SAMPLES = 128
MAX_STRING = 4096
"""Characters of a stop string or bad word."""


CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of StructuredOutputsParams that hold a constraint; a request has exactly one."""
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]}

_EXTRA = api("vLLM", "responses") | api("headrace", "messages")
"""APIs of a parameter that the other protocols lack."""
_OPENAI_EXTRA, _VLLM_EXTRA = api("OpenAI") | _EXTRA, api("vLLM") | _EXTRA
_OPENAI_AND_ANTHROPIC = api("OpenAI", "chat", "completions", "responses") | api("Anthropic", "messages")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=CheckedStructType):
    """Constraint on the output: exactly one, with options for JSON. Immutable; checked when it is made.

    Raises:
        RequestError: there is not exactly one constraint, or a value is of another type or out of range.
    """

    json: Annotated[Any, OptionSpec(schema=_SCHEMA)] = None
    """JSON Schema of the output: an object, its text, or in Python a pydantic class. Kept as text."""
    json_object: bool | None = None
    """true: the output is a JSON object."""
    regex: Annotated[str | None, OptionSpec(min=1)] = None
    """Regular expression that the whole output matches, in Rust's syntax, which has no look-around."""
    choice: Annotated[list[str] | None, OptionSpec(min=1, empty=False)] = None
    """The output is one of these strings."""
    grammar: Annotated[str | None, OptionSpec(min=1)] = None
    """Context-free grammar of the output: GBNF with a rule `root ::=`, or Lark with a rule `start:`."""
    structural_tag: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "object"}, {"type": "string"}]})] = None
    """Text with structured parts: an object with `format`, or with `structures` and `triggers`, or its text. Kept as text."""
    disable_any_whitespace: bool | None = None
    """Write JSON without whitespace between its tokens. Default: the server's --structured-outputs-config."""
    disable_additional_properties: bool | None = None
    """Allow no keys beside an object's `properties` where the schema does not say. Default: the server's
    --structured-outputs-config."""
    whitespace_pattern: Annotated[str | None, OptionSpec(min=1, max=256)] = None
    """Regular expression of the whitespace between tokens of JSON; it may match whitespace only."""
    strict: bool = True
    """Refuse a `format` of strings that cannot be enforced. false: it is an annotation."""

    def validate(self) -> None:
        """Checks the fields, alone and together."""
        check(self, RequestError)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise RequestError(f"give exactly one of {', '.join(CONSTRAINTS)}, not {named}", given[1] if given else None)
        if self.json_object is False:
            raise RequestError("json_object may only be true; leave it out for free text", "json_object")
        if self.regex is not None and "\0" in self.regex:
            raise RequestError("regex must not contain NUL", "regex")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError("whitespace_pattern and disable_any_whitespace exclude each other", "whitespace_pattern")
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        if self.structural_tag is not None:
            msgspec.structs.force_setattr(self, "structural_tag", _object_text(self.structural_tag))
        elif self.json is None and self.json_object is None and (self.whitespace_pattern or self.disable_any_whitespace):
            name = "whitespace_pattern" if self.whitespace_pattern else "disable_any_whitespace"
            raise RequestError(f"{name} is for json, json_object and structural_tag", name)

    @property
    def kind(self) -> str:
        """The constraint that is given, one of CONSTRAINTS."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)


def _object_text(value: Any) -> str:
    if not isinstance(value, str | dict):
        raise RequestError("structural_tag must be an object or its text", "structural_tag", code="invalid_type")
    return _json_text(value, "structural_tag", "JSON")


def _schema_text(schema: Any) -> str:
    """JSON Schema as text. A pydantic class has its own."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, str | dict | bool):
        raise RequestError("json must be a JSON Schema: an object or its text", "json", code="invalid_type")
    return _json_text(schema, "json", "a JSON Schema")


def _json_text(value: Any, param: str, kind: str) -> str:
    try:
        text = value if isinstance(value, str) else jsonlib.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not {kind}: {str(error) or type(error).__name__}", param) from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=CheckedStructType):
    """Sampling parameters of one request. Immutable; checked when it is made.

    Numbers that the device keeps as float32 must be finite there. The order of a step: logit_bias and bans, penalties,
    temperature, min_p, top_k, top_p, sample.

    Raises:
        RequestError: a value is of another type or out of range; the error names the field.
    """

    max_tokens: Annotated[
        int | None,
        OptionSpec(min=1, max=INT32_MAX, default="what is left of the context", metavar="INTEGER", apis=api("OpenAI", "chat")),
    ] = None
    """Largest number of tokens to generate for each sample."""
    min_tokens: Annotated[
        int, OptionSpec(min=0, max=INT32_MAX, metavar="INTEGER", apis=api("vLLM", "chat", "completions", "responses"))
    ] = 0
    """Number of tokens to generate before the end-of-sequence token, a stop token or a stop string can end the output."""
    temperature: Annotated[
        float, OptionSpec(min=0.0, max=FLOAT32_MAX, default="the model's, else 1.0", apis=_OPENAI_AND_ANTHROPIC)
    ] = 1.0
    """Divides the logits before sampling. 0 always takes the most likely token; higher values are more random."""
    top_p: Annotated[float, OptionSpec(above=0.0, max=1.0, default="the model's, else 1.0", apis=_OPENAI_AND_ANTHROPIC)] = 1.0
    """Nucleus sampling: sample from the smallest set of most likely tokens whose probabilities sum to at least this."""
    top_k: Annotated[
        int,
        OptionSpec(
            min=-1,
            max=INT32_MAX,
            default="the model's, else 0",
            apis=api("vLLM", "chat", "completions", "responses") | api("Anthropic", "messages"),
        ),
    ] = 0
    """Sample from this many most likely tokens. 0 or -1: from all."""
    min_p: Annotated[float, OptionSpec(min=0.0, max=1.0, default="the model's, else 0.0", apis=_VLLM_EXTRA)] = 0.0
    """Leave out tokens whose probability is below this fraction of the most likely token's."""
    seed: Annotated[
        int | None,
        OptionSpec(
            min=-INT64_MAX - 1,
            max=INT64_MAX,
            flags=("--sampling-seed",),
            default="drawn from --seed",
            apis=_OPENAI_EXTRA,
        ),
    ] = None
    """Seed of the random numbers. The same seed, prompt and parameters generate the same tokens."""
    n: Annotated[int, OptionSpec(min=1, max=MAX_SAMPLES, flags=("--n", "-n"), apis=api("OpenAI"))] = 1
    """Number of independent samples of each prompt. They share the KV cache of the prompt."""
    repetition_penalty: Annotated[
        float, OptionSpec(min=FLOAT32_TINY, max=FLOAT32_MAX, default="the model's, else 1.0", apis=_VLLM_EXTRA)
    ] = 1.0
    """Applied to tokens in the prompt or the output: divides a positive logit and multiplies a negative one. Values above 1
    make these tokens less likely."""
    presence_penalty: Annotated[float, OptionSpec(min=-2.0, max=2.0, apis=_OPENAI_EXTRA)] = 0.0
    """Subtracted once from the logit of each token that was generated so far."""
    frequency_penalty: Annotated[float, OptionSpec(min=-2.0, max=2.0, apis=_OPENAI_EXTRA)] = 0.0
    """Subtracted from a token's logit for each time it was generated so far."""
    logit_bias: Annotated[dict[int, float] | None, OptionSpec(min=-100.0, max=100.0, metavar="JSON", apis=_OPENAI_EXTRA)] = None
    """JSON object from token id to a number that is added to its logit."""
    allowed_token_ids: Annotated[
        list[int] | None, OptionSpec(min=0, max=INT32_MAX, empty=False, metavar="IDS", apis=_VLLM_EXTRA)
    ] = None
    """The only token ids that may be generated."""
    bad_words: Annotated[list[str] | None, OptionSpec(min=1, max=MAX_STRING, flags=("--bad-word",), apis=_VLLM_EXTRA)] = None
    """Strings that never appear in the output, however they are tokenised."""
    stop: Annotated[
        list[str] | None, OptionSpec(min=1, max=MAX_STRING, single=True, apis=api("OpenAI") | api("vLLM", "responses"))
    ] = None
    """Strings that end the output."""
    include_stop_str_in_output: Annotated[bool, OptionSpec(apis=api("vLLM"))] = False
    """Keep the stop string at the end of the text."""
    stop_token_ids: Annotated[list[int] | None, OptionSpec(min=0, max=INT32_MAX, metavar="IDS", apis=_VLLM_EXTRA)] = None
    """Token ids that end the output."""
    ignore_eos: Annotated[bool, OptionSpec(apis=_VLLM_EXTRA)] = False
    """Continue after the end-of-sequence token, up to max_tokens. For benchmarks."""
    logprobs: Annotated[int | None, OptionSpec(min=-1, max=INT32_MAX)] = None
    """Number of most likely tokens to report at each output position, with log-probabilities, beside the generated token.
    -1: the whole vocabulary."""
    logprobs_mode: Annotated[LogprobsMode | None, OptionSpec(default="as --logprobs-mode says", apis=api("headrace"))] = None
    """raw: log-probabilities of the model's logits. processed: of the distribution that tokens are sampled from."""
    return_sampling_mask: bool = False
    """Report the tokens that masks and filters left to sample from, beside the logprobs of each output token."""
    return_routed_experts: bool = False
    """Report the experts that a mixture's routers chose for each token. Needs --enable-return-routed-experts; of the prefix
    cache, the request takes what requests of its kind have left there."""
    prompt_logprobs: Annotated[int | None, OptionSpec(min=-1, max=INT32_MAX, apis=api("vLLM"))] = None
    """Number of most likely tokens to report at each prompt position. -1: the whole vocabulary."""
    structured_outputs: Annotated[StructuredOutputsParams | None, OptionSpec(metavar="JSON", apis=api("vLLM"))] = None
    """Constraint on the output: exactly one of json, json_object, regex, choice and grammar, with options."""
    sparse_prefill: Annotated[
        bool | None,
        OptionSpec(default="as --sparse-prefill says", apis=api("headrace", "chat", "completions", "responses", "messages")),
    ] = None
    """Attend sparsely in the prompt: false computes it densely; true computes it sparsely, however short it is, and needs a
    server that was started with --sparse-prefill, or a model with elastic attention."""
    skip_special_tokens: Annotated[bool, OptionSpec(apis=api("vLLM"))] = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Convert the output tokens to text."""

    def validate(self) -> None:
        """Checks the fields, alone and together."""
        check(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", "min_tokens")
        if self.return_sampling_mask and self.logprobs is None:
            raise RequestError("return_sampling_mask needs logprobs", "return_sampling_mask")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=true", "stop")

    def replace(self, fields: dict[str, Any]) -> SamplingParams:
        """A checked copy with other values of some fields."""
        return SamplingParams(**msgspec.structs.asdict(self) | fields)

    @property
    def greedy(self) -> bool:
        """True when sampling is an argmax and needs no random number."""
        return self.temperature == 0.0 or self.top_k == 1
