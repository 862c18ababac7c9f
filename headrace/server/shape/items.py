"""The parts of OpenAI's Responses requests, as they are declared."""

from __future__ import annotations

from typing import Any, Literal

from headrace.server.shape.turns import Strict


class _Tagged(Strict, tag_field="type", kw_only=True):
    pass


class _Item(_Tagged, kw_only=True):
    id: str | None = None
    status: str | None = None


class InputText(_Tagged, tag="input_text", kw_only=True):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(_Tagged, tag="input_image", kw_only=True):
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    """A hint by which others choose a size; here the model's processor does."""
    file_id: None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(_Tagged, tag="output_text", kw_only=True):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class Refusal(_Tagged, tag="refusal", kw_only=True):
    refusal: str


class ReasoningText(_Tagged, tag="reasoning_text", kw_only=True):
    text: str


class Message(_Item, tag="message", kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText | Refusal]
    phase: str | None = None


class FunctionCall(_Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    parsed_arguments: Any = None


class FunctionCallOutput(_Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: str | list[InputText | InputImage | OutputText]
    name: str | None = None


class CustomToolCall(_Item, tag="custom_tool_call", kw_only=True):
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CustomToolCallOutput(_Item, tag="custom_tool_call_output", kw_only=True):
    call_id: str
    output: str | list[InputText | InputImage | OutputText]


class Reasoning(_Item, tag="reasoning", kw_only=True):
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class AdditionalTools(_Item, tag="additional_tools", kw_only=True):
    tools: list[dict[str, Any]]
    role: Literal["developer"] = "developer"


class ItemReference(_Tagged, tag="item_reference", kw_only=True):
    id: str


Item = Message | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput | Reasoning | AdditionalTools


class _Tool(_Tagged, kw_only=True):
    name: str
    description: str | None = None
    defer_loading: bool | None = None
    """Accepted for a tool search, which this server does not have: the model is shown all tools."""
    allowed_callers: list[str] | None = None


class FunctionTool(_Tool, tag="function", kw_only=True):
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class TextFormat(_Tagged, tag="text", kw_only=True):
    pass


class GrammarFormat(_Tagged, tag="grammar", kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(_Tool, tag="custom", kw_only=True):
    format: TextFormat | GrammarFormat | None = None


class Namespace(_Tagged, tag="namespace", kw_only=True):
    """Tools whose names are unique among each other."""

    name: str
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


Tool = FunctionTool | CustomTool | Namespace


class JSONObject(_Tagged, tag="json_object", kw_only=True):
    pass


class JSONSchema(_Tagged, tag="json_schema", kw_only=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict, kw_only=True):
    format: TextFormat | JSONObject | JSONSchema | None = None
    verbosity: str | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(Strict, kw_only=True):
    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class Named(_Tagged, tag="function", kw_only=True):
    name: str
    namespace: str | None = None


class NamedCustom(_Tagged, tag="custom", kw_only=True):
    name: str
    namespace: str | None = None


class AllowedTools(_Tagged, tag="allowed_tools", kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


ToolChoice = Named | NamedCustom | AllowedTools
