"""What the server does with every request field: one table for the check, the documentation and the tests."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from headrace.constrain.fields import ConstraintFields
from headrace.core.request import Request
from headrace.errors import RequestError, did_you_mean, unknown, wrong_type
from headrace.options import options
from headrace.sampling_params import SamplingParams
from headrace.server.errors import shown
from headrace.server.schema import EXTRAS, Metadata

Endpoint = Literal["chat", "completions", "messages", "count_tokens", "responses"]
Origin = Literal["OpenAI", "Codex", "Anthropic", "vLLM", "SGLang", "llama.cpp", "headrace"]
Treatment = Literal["applied", "accepted", "refused"]

_BOTH: tuple[Endpoint, ...] = ("chat", "completions")
_CHAT: tuple[Endpoint, ...] = ("chat",)
_TEXT: tuple[Endpoint, ...] = ("completions",)
_MESSAGES: tuple[Endpoint, ...] = ("messages",)
_RESPONSES: tuple[Endpoint, ...] = ("responses",)
_COUNTED: tuple[Endpoint, ...] = ("messages", "count_tokens")
_ONLY_TEXT = Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)]
_NAMED = ("temperature", "top_p", "sparse_prefill")
"""Extras of responses that are not vLLM's."""


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """One field of a request body."""

    name: str
    endpoints: tuple[Endpoint, ...]
    origin: Origin
    treatment: Treatment
    """applied: has its documented effect. accepted: cannot affect generation. refused: values other than ``takes`` fail."""
    why: str
    takes: Any = None
    """Type of the values that pass; of a refused field, those that ask for nothing. None for applied fields: their
    request model says what they take. null always passes, and means that the field is left out."""
    takes_text: str = ""
    code: str = "unsupported_parameter"
    """Of the error, where the field is refused."""


def _rules(treatment: Treatment, origin: Origin, endpoints: tuple[Endpoint, ...], **fields: Any) -> list[FieldRule]:
    """Each of ``fields`` is a reason, or (reason, type of the values that pass, those in words)."""
    given = ((name, rule if isinstance(rule, tuple) else (rule, None, "")) for name, rule in fields.items())
    return [FieldRule(name, endpoints, origin, treatment, *rule) for name, rule in given]


_applied, _accepted, _refused = (functools.partial(_rules, treatment) for treatment in typing.get_args(Treatment))


def _declared(origin: Origin, endpoints: tuple[Endpoint, ...], names: str, cls: Any) -> list[FieldRule]:
    """Fields that ``cls`` declares, which also checks them."""
    declared = options(cls)
    return _applied(origin, endpoints, **{name: declared[name].help for name in names.split()})


class _KeptThinking(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _NoEdits(TypedDict, total=False):
    """A ``context_management`` that edits nothing, as agents send it with every request."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    edits: list[_KeptThinking]


FIELDS: tuple[FieldRule, ...] = (
    *_declared("OpenAI", _BOTH, "temperature top_p frequency_penalty presence_penalty logit_bias seed stop n", SamplingParams),
    *_declared("OpenAI", _CHAT, "max_tokens", SamplingParams),
    *_declared(
        "vLLM",
        _BOTH,
        "top_k min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output bad_words allowed_token_ids "
        "ignore_eos skip_special_tokens prompt_logprobs structured_outputs",
        SamplingParams,
    ),
    *_declared("OpenAI", _CHAT, "response_format", ConstraintFields),
    *_declared("vLLM", _TEXT, "response_format", ConstraintFields),
    *_declared(
        "vLLM",
        _BOTH,
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern",
        ConstraintFields,
    ),
    *_declared("SGLang", _BOTH, "regex ebnf json_schema", ConstraintFields),
    *_declared("llama.cpp", _BOTH, "grammar", ConstraintFields),
    *_declared("headrace", _BOTH, "logprobs_mode sparse_prefill", SamplingParams),
    *_applied(
        "headrace",
        _BOTH,
        return_attention_report="Add attention, how the prompt attended, to the answer or to its last chunk; needs one prompt.",
    ),
    *_declared("headrace", _RESPONSES, "sparse_prefill", SamplingParams),
    *_declared("vLLM", _BOTH, "cache_salt priority", Request),
    *_applied(
        "OpenAI",
        _BOTH,
        model="Name of the model, one of /v1/models. Default: the model that is served.",
        stream="Answer with server-sent events.",
        stream_options="Object with include_usage and vLLM's continuous_usage_stats. include_obfuscation may only be false.",
        user="Session of the request for --dp-routing-policy session, without the header X-Session-ID.",
    ),
    *_applied(
        "OpenAI",
        _CHAT,
        messages="Conversation. Roles system, developer (rendered as system), user, assistant and tool; text content.",
        max_completion_tokens="Newer name of max_tokens; if both are given, they must agree.",
        logprobs="true: report log-probabilities of the generated tokens.",
        top_logprobs="Number of most likely tokens to report at each position; needs logprobs.",
    ),
    *_applied(
        "OpenAI",
        _TEXT,
        prompt="String, list of strings, token ids, or list of lists of token ids.",
        max_tokens=options(SamplingParams)["max_tokens"].help + " With echo, 0 returns the prompt alone.",
        suffix="Text that follows the generated one: the model fills in the middle. Needs a vocabulary with tokens for it.",
        echo="Return the prompt before the text; with logprobs, those of the prompt too.",
        logprobs="Number of most likely tokens to report at each position; 0: the generated token alone.",
        best_of="Must equal n: headrace returns every sample that it generates.",
    ),
    *_applied(
        "vLLM",
        _BOTH,
        return_token_ids="Add token_ids and prompt_token_ids to the answer.",
        return_metrics="Add metrics, the times of this request, to the answer or to its last chunk; needs one choice.",
        add_special_tokens="Add the tokenizer's special tokens. Default: false for chat, whose template has them; true for "
        "completions.",
    ),
    *_applied(
        "vLLM",
        _CHAT,
        chat_template_kwargs="Further variables for the chat template.",
        mm_processor_kwargs="Options of the model's processor of pictures and videos, such as min_pixels and max_pixels.",
        add_generation_prompt="End the prompt with the start of the assistant's turn. Default: true.",
        continue_final_message="Continue the last message instead of starting a new turn.",
        thinking_token_budget="Number of tokens of reasoning at most; then its end is forced. -1 (default): no limit; "
        "a model that does not reason keeps any.",
        include_reasoning="false: leave reasoning out of the answer.",
    ),
    *_applied(
        "OpenAI",
        _CHAT,
        tools="Functions that the model may call. With strict: true, arguments hold the function's parameters.",
        tool_choice="none, auto (default), required, a function, or allowed_tools.",
        parallel_tool_calls="false: the answer ends with its first call.",
        functions="Older form of tools: a list of functions. The answer has one call at most, as function_call.",
        function_call="Older name of tool_choice.",
        reasoning_effort="none, minimal, low, medium, high, xhigh or max, as far as the chat template has variables for it.",
    ),
    *_applied("SGLang", _CHAT, separate_reasoning="false: leave reasoning in the content, as the model writes it."),
    *_applied(
        "headrace", _CHAT, stop_in_reasoning="true: stop strings end the answer in reasoning too. Default: in content only."
    ),
    *_declared("OpenAI", _RESPONSES, "temperature top_p", SamplingParams),
    *_declared(
        "vLLM",
        _RESPONSES,
        " ".join(name for name in f"{EXTRAS} stop min_tokens".split() if name not in _NAMED),
        SamplingParams,
    ),
    *_declared("vLLM", _RESPONSES, "cache_salt priority", Request),
    *_applied("vLLM", _RESPONSES, chat_template_kwargs="Further variables for the chat template."),
    *_applied(
        "OpenAI",
        _RESPONSES,
        model="Name of the model, one of /v1/models. Default: the model that is served.",
        input="A string, or items: message, function_call, custom_tool_call, their outputs, reasoning and item_reference.",
        instructions="System prompt of this request; later ones do not inherit it.",
        max_output_tokens="Largest number of tokens to generate.",
        top_logprobs="Number of most likely tokens to report at each position; needs include.",
        include="List of message.output_text.logprobs and reasoning.encrypted_content. Others belong to tools that it does "
        "not run and have no effect.",
        text="Object with format (text, json_object or json_schema) and verbosity, as in chat.",
        tools="Functions, custom tools, whose format may be text or a grammar, and namespaces of both. Others: see "
        "--unsupported-tools.",
        tool_choice="As in chat: auto (default), none, required, a function or custom tool, allowed_tools.",
        parallel_tool_calls="false: the answer ends with its first call.",
        max_tool_calls="Repeated in the response; it counts tools that the server would run.",
        reasoning="Object with effort, as reasoning_effort in chat; summary is taken, and the whole reasoning is shown.",
        store="false: do not keep the response. Default: true, unless the server keeps none.",
        previous_response_id="Continue the conversation of a stored response.",
        stream="Answer with server-sent events.",
        stream_options="Object with include_obfuscation, which may only be false.",
        metadata="Up to 16 strings by name, repeated in the response.",
        user="Repeated in the response; otherwise as in chat.",
        safety_identifier="Repeated in the response.",
        prompt_cache_key="Repeated in the response; every equal prefix is found in the cache.",
    ),
    *_accepted(
        "Codex", _RESPONSES, client_metadata=("labels for the caller's own records", dict[str, str], "an object of strings")
    ),
    *_refused(
        "OpenAI",
        _RESPONSES,
        background=("a response ends with its connection", Literal[False], "false"),
        truncation=("the server edits no conversation", Literal["disabled"], '"disabled"'),
        service_tier=("there is one tier", Literal["auto", "default"], '"auto", "default"'),
        access_programs="there are no such programs",
        background_options="a response ends with its connection",
        context_management="the server edits no conversation",
        conversation="conversations are not stored; use previous_response_id",
        image="the model answers in text",
        moderation="the server moderates nothing",
        prompt="prompts are not stored",
        prompt_cache_options="the prefix cache works by itself and promises no lifetime",
        prompt_cache_retention="the prefix cache works by itself and promises no lifetime",
    ),
    *_declared("Anthropic", _MESSAGES, "temperature top_p top_k", SamplingParams),
    *_declared(
        "headrace",
        _MESSAGES,
        " ".join(name for name in EXTRAS.split() if name not in ("temperature", "top_p", "top_k")),
        SamplingParams,
    ),
    *_declared("headrace", _MESSAGES, "cache_salt priority", Request),
    *_applied("headrace", _COUNTED, chat_template_kwargs="Further variables for the chat template."),
    *_applied(
        "Anthropic",
        _COUNTED,
        model="Name of the model, one of /v1/models. Default: the model that is served.",
        messages="Conversation: text, tool_use, tool_result, thinking and redacted_thinking blocks.",
        system="System prompt: a string or text blocks.",
        tools="Tools that the client runs: name, description, input_schema, input_examples, strict. Others: see "
        "--unsupported-tools.",
        tool_choice="auto (default), any, tool or none, with disable_parallel_tool_use.",
        thinking="enabled with budget_tokens, adaptive or disabled: sets enable_thinking of the chat template; "
        "a model that does not reason keeps any budget.",
        output_config="Object with effort and format, a JSON schema of the answer.",
    ),
    *_applied(
        "Anthropic",
        _MESSAGES,
        max_tokens="Largest number of tokens to generate. Where the context ends before, so does the answer.",
        stop_sequences="Strings that end the output.",
        stream="Answer with server-sent events.",
    ),
    *_accepted("Anthropic", _COUNTED, cache_control=("every prefix is cached", dict[str, Any], "an object")),
    *_accepted(
        "Anthropic",
        _MESSAGES,
        metadata=("labels for the caller's own records", dict[Literal["user_id"], str | None], "an object with user_id"),
    ),
    *_refused(
        "Anthropic",
        _MESSAGES,
        service_tier=("there is one tier", Literal["auto", "standard_only"], '"auto", "standard_only"'),
        container="the server runs no tools of its own",
        mcp_servers="the server runs no tools of its own",
        context_management=(
            "the server edits no conversation",
            _NoEdits,
            'an object whose edits are "clear_thinking_20251015" with keep "all"',
        ),
        diagnostics="there are no such diagnostics",
        inference_geo="the server is where it is",
    ),
    # Anthropic's helpers go on without threads after an error with this code.
    *(
        dataclasses.replace(rule, code="thread_unsupported_request")
        for rule in _refused("Anthropic", _MESSAGES, thread="the server holds no conversations for clients of this API")
    ),
    *_refused(
        "Anthropic",
        _COUNTED,
        speed=("there is one speed", Literal["standard"], '"standard"'),
        user_profile_id="the server keeps no profiles",
        workspace_id="the server has no workspaces",
    ),
    *_accepted(
        "OpenAI",
        _CHAT,
        safety_identifier=("a label for the caller's own records", str, "any string"),
        metadata=("labels on stored completions; nothing is stored", Metadata, "up to 16 strings by name"),
        prompt_cache_key=(
            "hints at where a shared prefix may be cached; here every equal prefix is found. To keep caches apart, use "
            "cache_salt",
            str,
            "any string",
        ),
    ),
    *_refused(
        "vLLM",
        _BOTH,
        use_beam_search=("there is no beam search", Literal[False], "false"),
        return_tokens_as_token_ids=(
            "logprobs name tokens by their text; return_token_ids adds the ids",
            Literal[False],
            "false",
        ),
        guided_decoding_backend="the backend is the server's: --structured-outputs-config",
        truncate_prompt_tokens="the server cuts no prompt",
        request_id="the server names its requests; the header X-Request-Id names them in its logs",
        logits_processors="the server runs no code of its clients",
        kv_transfer_params="the server transfers no KV cache",
        vllm_xargs="there are no plugins that could take them",
    ),
    *_accepted(
        "vLLM",
        _BOTH,
        length_penalty=("it weighs beams, and there are none", float, "any number"),
        spaces_between_special_tokens=(
            "it is for tokenizers written in Python, and there are none here",
            bool,
            "true or false",
        ),
    ),
    *_refused(
        "vLLM",
        _CHAT,
        echo=("the answer does not repeat the last message", Literal[False], "false"),
        chat_template="the template is the server's: --chat-template",
        documents="the server passes no documents to the template: put them into a message",
        media_io_kwargs="how media are read is the server's choice",
    ),
    *_refused("vLLM", _TEXT, prompt_embeds="a prompt is text or token ids"),
    *_refused(
        "OpenAI",
        _CHAT,
        store=("completions are not stored", Literal[False], "false"),
        service_tier=("there is one tier", Literal["auto", "default"], '"auto", "default"'),
        modalities=("the model answers in text", _ONLY_TEXT, '["text"]'),
        audio="the model answers in text",
        prediction="predicted outputs are not served",
        verbosity=("the model has no such setting", Literal["medium"], '"medium"'),
        web_search_options="the server searches nothing",
        moderation="the server moderates nothing",
        prompt_cache_options=(
            "the prefix cache works by itself and promises no lifetime",
            dict[Literal["mode"], Literal["implicit"]],
            '{"mode": "implicit"}',
        ),
        prompt_cache_retention=(
            "the prefix cache lives in memory and promises no lifetime",
            Literal["in_memory"],
            '"in_memory"',
        ),
    ),
)


@cache
def rules(endpoint: Endpoint) -> Mapping[str, FieldRule]:
    """The table of one endpoint, by field name."""
    return {rule.name: rule for rule in FIELDS if endpoint in rule.endpoints}


def applied_fields(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Holds a body (without nulls) against the table; returns the fields that the request model takes.

    Raises:
        RequestError: for a field that is unknown, that is refused, or that has a value of the wrong type.
    """
    table, applied = rules(endpoint), {}
    for name, value in body.items():
        rule = table.get(name)
        if rule is None:
            raise unknown(shown(name), did_you_mean(shown(name), table))
        if rule.treatment == "applied":
            applied[name] = value
        elif not takes(rule, value):
            raise _refusal(rule)
    return applied


def takes(rule: FieldRule, value: Any) -> bool:
    """Whether a field that is not applied may have a value."""
    if rule.takes is None:
        return False
    try:
        _adapter(rule.name, rule.endpoints).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@cache
def _adapter(name: str, endpoints: tuple[Endpoint, ...]) -> TypeAdapter[Any]:
    rule = next(rule for rule in FIELDS if (rule.name, rule.endpoints) == (name, endpoints))
    return TypeAdapter(rule.takes)


def _refusal(rule: FieldRule) -> RequestError:
    takes = f" (it may be left out, or be {rule.takes_text})" if rule.takes_text else ""
    if rule.treatment == "accepted":
        return wrong_type(rule.name, rule.takes_text)
    return RequestError(f"{rule.name} is not supported: {rule.why}{takes}", rule.name, code=rule.code)
