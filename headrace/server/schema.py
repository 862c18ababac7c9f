"""Request bodies as pydantic models: the fields that are applied, with their types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from headrace.sampling_params import MAX_SEED, LogprobsMode

INT32 = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]
# Checked by hand (prompts.py): a union would be tried variant by variant, and report an error for each.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Stop = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": None})
]


class Body(BaseModel):
    """Strict: no field that it does not know, no coercion between types, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class SamplingBody(Body):
    """What chat and text completions share. None: the model's default (``generation_config.json``), else the API's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: float | None = None
    seed: Seed | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: Count = 0
    max_tokens: Count | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=INT32)] = 1
    prompt_logprobs: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    logprobs_mode: LogprobsMode = "raw"
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] = 0
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatMessage(Body):
    """One message. ``content`` is checked in messages.py, where errors can name the part."""

    role: str
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    """None: unless the final message is continued."""
    continue_final_message: bool = False


class CompletionBody(SamplingBody):
    prompt: Prompt
    echo: bool = False
    logprobs: Count | None = None
    best_of: Count | None = None
    add_special_tokens: bool = True


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """None: as in completions (true) for a prompt, as in chat (false) for messages."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
