"""Request bodies: the fields that are applied, with their types.

Sampling parameters are not among the fields of a model here: ``SamplingParams`` declares and checks them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

from headrace.constrain.fields import ConstraintFields
from headrace.core.request import Request
from headrace.options import INT32_MAX, options
from headrace.sampling_params import SamplingParams

_SAMPLING = options(SamplingParams)
_REQUEST = options(Request)
_CONSTRAINTS = options(ConstraintFields)

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
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
# Checked by text/chat.py, where errors can name the part of a message.
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]
# Checked by tools.py.
Tools = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]


class RequestBody(BaseModel):
    """Strict: no field that it does not know, no coercion between types, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: Literal[False] = False


class StreamOptions(ResponsesStreamOptions):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SampledBody(RequestBody):
    """What all requests for text share. The table of fields has refused every other name before."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    cache_salt: Annotated[Any, WithJsonSchema(_REQUEST["cache_salt"].json_schema())] = None
    priority: Annotated[Any, WithJsonSchema(_REQUEST["priority"].json_schema())] = 0
    stream: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, unchecked."""
        return self.model_extra or {}

    @classmethod
    def sampling_schema(cls) -> dict[str, Any]:
        """JSON Schema of the sampling parameters."""
        known = {name: option for name, option in _SAMPLING.items() if name not in cls.model_fields and name != "detokenize"}
        known |= _CONSTRAINTS
        return {name: option.json_schema() for name, option in known.items()}


def _choice_schema(*names: str) -> dict[str, Any]:
    return {"anyOf": [{"type": "string", "enum": list(names)}, {"type": "object"}]}


class GenerationBody(SampledBody):
    """What chat and text completions share."""

    return_token_ids: bool = False
    return_metrics: bool = False
    return_attention_report: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatBody(GenerationBody):
    messages: Messages
    logprobs: bool = False
    top_logprobs: Count | None = None
    max_completion_tokens: Annotated[Any, WithJsonSchema(_SAMPLING["max_tokens"].json_schema())] = None
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    """None: unless the final message is continued."""
    continue_final_message: bool = False
    tools: Tools = None
    tool_choice: Annotated[Any, WithJsonSchema(_choice_schema("none", "auto", "required"))] = None
    parallel_tool_calls: bool = True
    functions: Tools = None
    function_call: Annotated[Any, WithJsonSchema(_choice_schema("none", "auto"))] = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stop_in_reasoning: bool = False


EXTRAS = (
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty logit_bias stop_token_ids "
    "bad_words allowed_token_ids ignore_eos sparse_prefill"
)
"""Sampling parameters that every protocol takes by the same names."""


class ProtocolBody(SampledBody):
    """A request of another protocol, from which a chat request is made."""

    chat_template_kwargs: dict[str, Any] = {}

    @classmethod
    def sampling_schema(cls) -> dict[str, Any]:
        return {name: _SAMPLING[name].json_schema() for name in EXTRAS.split()}


class CountTokensBody(RequestBody):
    """The parts that are not typed here are checked by shape/messages.py, which names places within them."""

    model: str | None = None
    messages: Messages
    system: Any = None
    tools: Tools = None
    tool_choice: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    thinking: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    output_config: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(CountTokensBody, ProtocolBody):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: list[str] | None = None


Label = Annotated[str, Field(max_length=64)]
Metadata = Annotated[dict[Label, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class ResponsesBody(ProtocolBody):
    """The parts that are not typed here are checked by shape/responses.py, which names places within them."""

    input: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})]
    instructions: str | None = None
    max_output_tokens: Annotated[Any, WithJsonSchema(_SAMPLING["max_tokens"].json_schema())] = None
    top_logprobs: Count | None = None
    include: Annotated[
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ],
        FailFast(),
    ] = []
    text: dict[str, Any] | None = None
    tools: Tools = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: bool = True
    max_tool_calls: Count | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def sampling_schema(cls) -> dict[str, Any]:
        return {name: _SAMPLING[name].json_schema() for name in f"{EXTRAS} stop min_tokens".split()}


class CompletionBody(GenerationBody):
    prompt: Prompt
    suffix: str | None = None
    echo: bool = False
    logprobs: Count | None = None
    max_tokens: Count | None = None
    """0 is for echo."""
    best_of: Count | None = None
    add_special_tokens: bool = True


class TokenizeBody(RequestBody):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    """None: as in completions (true) for a prompt, as in chat (false) for messages."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: Annotated[list[Count], FailFast()]
    skip_special_tokens: bool = False
