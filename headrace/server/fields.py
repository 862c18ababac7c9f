"""Treatment of every request field: one table for the check, the documentation and the tests.

The fields that are applied are declared where their values are kept; the others, which keep nothing, are declared here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from headrace.errors import RequestError, did_you_mean, unknown, wrong_type
from headrace.options import Endpoint, InvalidValueError, Option, OptionSpec, Origin, is_one_of, options
from headrace.server.errors import shown
from headrace.server.schema import BODIES, ResponsesBody, applied_options

Treatment = Literal["applied", "accepted", "refused"]

_BOTH: tuple[Endpoint, ...] = ("chat", "completions")
_CHAT: tuple[Endpoint, ...] = ("chat",)
_MESSAGES: tuple[Endpoint, ...] = ("messages",)
_RESPONSES: tuple[Endpoint, ...] = ("responses",)
_COUNTED: tuple[Endpoint, ...] = ("messages", "count_tokens")
_GENERATE: tuple[Endpoint, ...] = ("generate",)
_METADATA = options(ResponsesBody)["metadata"]


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """One field of a request body."""

    name: str
    endpoints: tuple[Endpoint, ...]
    origin: Origin
    treatment: Treatment
    """applied: has its documented effect. accepted: cannot affect generation. refused: values other than ``takes`` fail."""
    why: str
    takes: list[Any] | Option | None = None
    """The values that pass; of a refused field, those that ask for nothing. None for applied fields, which their declarations
    check. null always passes, and means that the field is left out."""
    takes_text: str = ""
    code: str = "unsupported_parameter"
    """Code of the error, where the field is refused."""


_DECLARED: Mapping[tuple[Treatment, Origin, tuple[Endpoint, ...]], Mapping[str, Any]] = {
    ("accepted", "Codex", _RESPONSES): {
        "client_metadata": ("labels for the caller's own records", dict[str, str], "an object of strings"),
    },
    ("refused", "OpenAI", _RESPONSES): {
        "background": ("a response ends with its connection", [False]),
        "truncation": ("the server edits no conversation", ["disabled"]),
        "service_tier": ("there is one tier", ["auto", "default"]),
        "access_programs": "there are no such programs",
        "background_options": "a response ends with its connection",
        "context_management": "the server edits no conversation",
        "conversation": "conversations are not stored; use previous_response_id",
        "image": "the model answers in text",
        "moderation": "the server moderates nothing",
        "prompt": "prompts are not stored",
        "prompt_cache_options": "the prefix cache works by itself and promises no lifetime",
        "prompt_cache_retention": "the prefix cache works by itself and promises no lifetime",
    },
    ("accepted", "Anthropic", _COUNTED): {"cache_control": ("every prefix is cached", dict[str, Any], "an object")},
    ("accepted", "Anthropic", _MESSAGES): {
        "metadata": ("labels for the caller's own records", dict[Literal["user_id"], str | None], "an object with user_id"),
    },
    ("refused", "Anthropic", _MESSAGES): {
        "service_tier": ("there is one tier", ["auto", "standard_only"]),
        "container": "the server runs no tools of its own",
        "mcp_servers": "the server runs no tools of its own",
        "context_management": (
            "the server edits no conversation",
            # Agents send it with every request.
            [{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {"edits": []}, {}],
        ),
        "diagnostics": "there are no such diagnostics",
        "inference_geo": "the server is where it is",
        "thread": "the server holds no conversations for clients of this API",
    },
    ("refused", "Anthropic", _COUNTED): {
        "speed": ("there is one speed", ["standard"]),
        "user_profile_id": "the server keeps no profiles",
        "workspace_id": "the server has no workspaces",
    },
    ("accepted", "OpenAI", _CHAT): {
        "safety_identifier": ("a label for the caller's own records", str, "any string"),
        "metadata": ("labels on stored completions; nothing is stored", _METADATA, "up to 16 strings by name"),
        "prompt_cache_key": (
            "hints at where a shared prefix may be cached; here every equal prefix is found. To keep caches apart, use "
            "cache_salt",
            str,
            "any string",
        ),
    },
    ("refused", "vLLM", _BOTH): {
        "use_beam_search": ("there is no beam search", [False]),
        "guided_decoding_backend": "the backend is the server's: --structured-outputs-config",
        "truncate_prompt_tokens": "the server cuts no prompt",
        "request_id": "the server names its requests; the header X-Request-Id names them in its logs",
        "logits_processors": "the server runs no code of its clients",
        "kv_transfer_params": "the server transfers no KV cache",
        "vllm_xargs": "there are no plugins that could take them",
    },
    ("accepted", "vLLM", _BOTH): {
        "length_penalty": ("it weighs beams, and there are none", float, "any number"),
        "spaces_between_special_tokens": (
            "it is for tokenizers written in Python, and there are none here",
            bool,
            "true or false",
        ),
    },
    ("refused", "vLLM", _CHAT): {
        "echo": ("the answer does not repeat the last message", [False]),
        "documents": "the server passes no documents to the template: put them into a message",
        "media_io_kwargs": "how media are read is the server's choice",
    },
    ("refused", "vLLM", ("completions",)): {"prompt_embeds": "a prompt is text or token ids"},
    ("accepted", "SGLang", _GENERATE): {
        "log_metrics": ("the server counts every request", bool, "true or false"),
        "no_logs": ("the log never has prompts and outputs", bool, "true or false"),
        "custom_labels": ("labels for the caller's own records", dict[str, str], "an object of strings"),
        "modalities": ("the prompt says what it has", list[str], "a list of strings"),
    },
    ("refused", "SGLang", _GENERATE): {
        "image_data": "pictures are parts of conversations: /v1/chat/completions",
        "video_data": "videos are parts of conversations: /v1/chat/completions",
        "audio_data": "audio clips are parts of conversations: /v1/chat/completions",
        "input_embeds": "a prompt is text or token ids",
        "token_ids_logprob": ("logprobs are of the sampled token and of the most likely ones", [[]]),
        "return_hidden_states": ("hidden states stay on the device", [False]),
        "custom_logit_processor": "the server runs no code of its clients",
        "session_params": "the server keeps no sessions: prefixes are found by their tokens",
        "priority": ("SGLang runs higher values first, and this server lower ones", [0]),
        "bootstrap_host": "the server transfers no KV cache",
        "bootstrap_room": "the server transfers no KV cache",
        "data_parallel_rank": "the router chooses the replica: --dp-routing-policy",
        "routed_dp_rank": "the router chooses the replica: --dp-routing-policy",
    },
    ("refused", "vLLM", ("inference",)): {
        "features": "pictures are parts of conversations: /v1/chat/completions",
        "kv_transfer_params": "the server transfers no KV cache",
    },
    ("refused", "OpenAI", _CHAT): {
        "store": ("completions are not stored", [False]),
        "service_tier": ("there is one tier", ["auto", "default"]),
        "modalities": ("the model answers in text", [["text"]]),
        "audio": "the model answers in text",
        "prediction": "predicted outputs are not served",
        "verbosity": ("the model has no such setting", ["medium"]),
        "web_search_options": "the server searches nothing",
        "moderation": "the server moderates nothing",
        "prompt_cache_options": ("the prefix cache works by itself and promises no lifetime", [{"mode": "implicit"}, {}]),
        "prompt_cache_retention": ("the prefix cache lives in memory and promises no lifetime", ["in_memory"]),
    },
}
"""Each field is a reason, (reason, list of the values that pass) or (reason, type of those, they in words)."""
_CODES = {"thread": "thread_unsupported_request"}
"""Errors after whose codes clients go on: Anthropic's helpers do so without threads."""


def _not_applied() -> Iterator[FieldRule]:
    for (treatment, origin, endpoints), fields in _DECLARED.items():
        for name, rule in fields.items():
            why, takes, *words = rule if isinstance(rule, tuple) else (rule, [])
            if isinstance(takes, list):
                words = [", ".join(map(json.dumps, takes))]
            elif not isinstance(takes, Option):
                takes = Option(None, name, OptionSpec(), takes, False)
            code = _CODES.get(name, FieldRule.code)
            yield FieldRule(name, endpoints, origin, treatment, why, takes, "".join(words), code)


def _applied() -> Iterator[FieldRule]:
    """A rule for each declaration, with the endpoints that take the field by the same API."""
    found: dict[tuple[str, Origin, str], list[Endpoint]] = {}
    for endpoint in BODIES:
        for name, option in applied_options(endpoint).items():
            found.setdefault((name, option.spec.apis[endpoint], option.help), []).append(endpoint)
    for (name, origin, why), endpoints in found.items():
        yield FieldRule(name, tuple(endpoints), origin, "applied", why)


FIELDS: tuple[FieldRule, ...] = (*_applied(), *_not_applied())


@cache
def rules(endpoint: Endpoint) -> Mapping[str, FieldRule]:
    """The table of one endpoint, by field name."""
    return {rule.name: rule for rule in FIELDS if endpoint in rule.endpoints}


def applied_fields(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Holds a body (without nulls) against the table; returns the fields that are applied, unchecked.

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
    if isinstance(rule.takes, list):
        return is_one_of(value, rule.takes)
    try:
        if rule.takes is not None:
            rule.takes.check(value)
    except InvalidValueError:
        return False
    return rule.takes is not None


def _refusal(rule: FieldRule) -> RequestError:
    takes = f" (it may be left out, or be {rule.takes_text})" if rule.takes_text else ""
    if rule.treatment == "accepted":
        return wrong_type(rule.name, rule.takes_text)
    return RequestError(f"{rule.name} is not supported: {rule.why}{takes}", rule.name, code=rule.code)
