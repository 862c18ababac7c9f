"""Request bodies: the declaration of every field that an endpoint applies, beside those of SamplingParams, Request and
ConstraintFields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from headrace.constrain.fields import ConstraintFields
from headrace.core.request import Request
from headrace.errors import RequestError
from headrace.options import INT32_MAX, INT64_MAX, CheckedStructType, Endpoint, Option, OptionSpec, api, check, options
from headrace.sampling_params import SamplingParams

_MAX_TOKENS = options(SamplingParams)["max_tokens"]
_OPENAI = api("OpenAI")
_CHAT = api("OpenAI", "chat")
_TEXT = api("OpenAI", "completions")
_RESPONSES = api("OpenAI", "responses")
_MESSAGES = api("Anthropic", "messages")
_COUNTED = api("Anthropic", "messages", "count_tokens")
_GENERATE = api("SGLang", "generate")
_INFERENCE = api("vLLM", "inference")
_OBJECTS: Mapping[str, Any] = {"type": "array", "items": {"type": "object"}}
_OBJECT: Mapping[str, Any] = {"type": "object"}
_TOKEN_IDS: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}}
PROMPTS: Mapping[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def _one_or_several(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


def _choice(*names: str) -> Mapping[str, Any]:
    return {"anyOf": [{"type": "string", "enum": list(names)}, _OBJECT]}


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body, which ``parsed_body`` has checked. Where the type is Any, the reader of the field checks it: it can
    name a part of the value."""


class ResponsesStreamOptions(msgspec.Struct, frozen=True, kw_only=True, metaclass=CheckedStructType):
    """Raises: RequestError, which names the field."""

    include_obfuscation: Literal[False] = False
    """May only be false."""

    def validate(self) -> None:
        """Checks the fields."""
        check(self, RequestError)


class StreamOptions(ResponsesStreamOptions, frozen=True, kw_only=True):
    include_usage: bool = False
    """Send the usage of tokens in a last chunk."""
    continuous_usage_stats: bool = False
    """Send the usage of tokens in every chunk."""


class SampledBody(RequestBody, frozen=True, kw_only=True):
    """Fields that all requests for text share."""

    sampling: dict[str, Any] = {}
    """The other fields that the endpoint takes: sampling parameters, unchecked."""
    model: Annotated[str | None, OptionSpec(apis=_OPENAI | _RESPONSES | _COUNTED | _INFERENCE)] = None
    """Name of the model, one of /v1/models. Default: the model that is served."""
    stream: Annotated[bool, OptionSpec(apis=_OPENAI | _RESPONSES | _MESSAGES | _GENERATE | _INFERENCE)] = False
    """Answer with server-sent events."""
    # Declared by Request, and checked where it is made.
    cache_salt: Any = None
    priority: Any = 0


class GenerationBody(SampledBody, frozen=True, kw_only=True):
    """Fields that chat and text completions share."""

    return_token_ids: Annotated[bool, OptionSpec(apis=api("vLLM"))] = False
    """Add token_ids and prompt_token_ids to the answer."""
    return_tokens_as_token_ids: Annotated[bool, OptionSpec(apis=api("vLLM"))] = False
    """Name the tokens of logprobs by their ids, as token_id:872."""
    return_weight_versions: Annotated[bool, OptionSpec(apis=api("vLLM"))] = False
    """Add weight_versions to each choice, or to its last chunk: which output tokens come from which version of the weights."""
    return_metrics: Annotated[bool, OptionSpec(apis=api("vLLM"))] = False
    """Add metrics, the times of this request, to the answer or to its last chunk; needs one choice."""
    return_attention_report: Annotated[bool, OptionSpec(apis=api("headrace"))] = False
    """Add attention, how the prompt attended, to the answer or to its last chunk; needs one prompt."""
    stream_options: Annotated[StreamOptions | None, OptionSpec(apis=_OPENAI)] = None
    """Object with include_usage and vLLM's continuous_usage_stats. include_obfuscation may only be false."""
    user: Annotated[str | None, OptionSpec(apis=_OPENAI)] = None
    """Session of the request for --dp-routing-policy session, without the header X-Session-ID."""
    lora_name: Annotated[str | None, OptionSpec(min=1, max=256, apis=api("headrace"))] = None
    """LoRA adapter, which `model` may name too. Default: the one that `model` names, or the base model."""


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: Annotated[Any, OptionSpec(apis=_CHAT, schema={**_OBJECTS, "minItems": 1})]
    """Conversation. Roles system, developer (rendered as system), user, assistant and tool; text content."""
    logprobs: Annotated[bool, OptionSpec(apis=_CHAT)] = False
    """true: report log-probabilities of the generated tokens."""
    top_logprobs: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_CHAT)] = None
    """Number of most likely tokens to report at each position; needs logprobs."""
    max_completion_tokens: Annotated[Any, OptionSpec(apis=_CHAT, schema=_MAX_TOKENS.json_schema())] = None
    """Newer name of max_tokens; if both are given, they must agree."""
    add_special_tokens: Annotated[bool, OptionSpec(apis=api("vLLM", "chat"))] = False
    """Add the tokenizer's special tokens. Default: false for chat, whose template has them; true for completions."""
    chat_template: Annotated[str | None, OptionSpec(min=1, apis=api("vLLM", "chat"))] = None
    """Jinja template in place of the model's; needs --trust-request-chat-template."""
    chat_template_kwargs: Annotated[dict[str, Any], OptionSpec(apis=api("vLLM", "chat"))] = {}
    """Further variables for the chat template."""
    mm_processor_kwargs: Annotated[dict[str, Any], OptionSpec(apis=api("vLLM", "chat"))] = {}
    """Options of the model's processor of pictures and videos, such as min_pixels and max_pixels."""
    add_generation_prompt: Annotated[bool | None, OptionSpec(apis=api("vLLM", "chat"))] = None
    """End the prompt with the start of the assistant's turn. Default: true."""
    continue_final_message: Annotated[bool, OptionSpec(apis=api("vLLM", "chat"))] = False
    """Continue the last message instead of starting a new turn."""
    tools: Annotated[Any, OptionSpec(apis=_CHAT, schema=_OBJECTS)] = None
    """Functions that the model may call. With strict: true, arguments hold the function's parameters."""
    tool_choice: Annotated[Any, OptionSpec(apis=_CHAT, schema=_choice("none", "auto", "required"))] = None
    """none, auto (default), required, a function, or allowed_tools."""
    parallel_tool_calls: Annotated[bool, OptionSpec(apis=_CHAT)] = True
    """false: the answer ends with its first call."""
    functions: Annotated[Any, OptionSpec(apis=_CHAT, schema=_OBJECTS)] = None
    """Older form of tools: a list of functions. The answer has one call at most, as function_call."""
    function_call: Annotated[Any, OptionSpec(apis=_CHAT, schema=_choice("none", "auto"))] = None
    """Older name of tool_choice."""
    reasoning_effort: Annotated[str | None, OptionSpec(apis=_CHAT)] = None
    """none, minimal, low, medium, high, xhigh or max, as far as the chat template has variables for it."""
    thinking_token_budget: Annotated[int | None, OptionSpec(apis=api("vLLM", "chat"))] = None
    """Number of tokens of reasoning at most; then its end is forced. -1 (default): no limit; a model that does not reason keeps
    any."""
    include_reasoning: Annotated[bool, OptionSpec(apis=api("vLLM", "chat"))] = True
    """false: leave reasoning out of the answer."""
    separate_reasoning: Annotated[bool, OptionSpec(apis=api("SGLang", "chat"))] = True
    """false: leave reasoning in the content, as the model writes it."""
    stop_in_reasoning: Annotated[bool, OptionSpec(apis=api("headrace", "chat"))] = False
    """true: stop strings end the answer in reasoning too. Default: in content only."""


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Annotated[Any, OptionSpec(apis=_TEXT, schema=PROMPTS)]
    """String, list of strings, token ids, or list of lists of token ids."""
    suffix: Annotated[str | None, OptionSpec(apis=_TEXT)] = None
    """Text that follows the generated one: the model fills in the middle. Needs a vocabulary with tokens for it."""
    echo: Annotated[bool, OptionSpec(apis=_TEXT)] = False
    """Return the prompt before the text; with logprobs, those of the prompt too."""
    logprobs: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_TEXT)] = None
    """Number of most likely tokens to report at each position; 0: the generated token alone."""
    max_tokens: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_TEXT)] = None
    """Largest number of tokens to generate for each sample. With echo, 0 returns the prompt alone."""
    best_of: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_TEXT)] = None
    """Must equal n: headrace returns every sample that it generates."""
    add_special_tokens: Annotated[bool, OptionSpec(apis=api("vLLM", "completions"))] = True
    """Add the tokenizer's special tokens. Default: false for chat, whose template has them; true for completions."""


class CountTokensBody(SampledBody, frozen=True, kw_only=True):
    """A conversation of Anthropic's API, which shape/messages.py reads."""

    messages: Annotated[Any, OptionSpec(apis=_COUNTED, schema={**_OBJECTS, "minItems": 1})]
    """Conversation: text, tool_use, tool_result, thinking and redacted_thinking blocks."""
    system: Annotated[Any, OptionSpec(apis=_COUNTED)] = None
    """System prompt: a string or text blocks."""
    tools: Annotated[Any, OptionSpec(apis=_COUNTED, schema=_OBJECTS)] = None
    """Tools that the client runs: name, description, input_schema, input_examples, strict. Others: see --unsupported-tools."""
    tool_choice: Annotated[Any, OptionSpec(apis=_COUNTED, schema=_OBJECT)] = None
    """auto (default), any, tool or none, with disable_parallel_tool_use."""
    thinking: Annotated[Any, OptionSpec(apis=_COUNTED, schema=_OBJECT)] = None
    """enabled with budget_tokens, adaptive or disabled: sets enable_thinking of the chat template; a model that does not reason
    keeps any budget."""
    output_config: Annotated[Any, OptionSpec(apis=_COUNTED, schema=_OBJECT)] = None
    """Object with effort and format, a JSON schema of the answer."""
    chat_template_kwargs: Annotated[dict[str, Any], OptionSpec(apis=api("headrace", "messages", "count_tokens"))] = {}
    """Further variables for the chat template."""


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    max_tokens: Annotated[int, OptionSpec(min=1, max=INT32_MAX, apis=_MESSAGES)]
    """Largest number of tokens to generate. Where the context ends before, so does the answer."""
    stop_sequences: Annotated[list[str] | None, OptionSpec(apis=_MESSAGES)] = None
    """Strings that end the output."""


class ResponsesBody(SampledBody, frozen=True, kw_only=True):
    """A conversation of OpenAI's Responses, which shape/responses.py reads."""

    input: Annotated[Any, OptionSpec(apis=_RESPONSES, schema={"anyOf": [{"type": "string"}, _OBJECTS]})]
    """A string, or items: message, function_call, custom_tool_call, their outputs, reasoning and item_reference."""
    instructions: Annotated[str | None, OptionSpec(apis=_RESPONSES)] = None
    """System prompt of this request; later ones do not inherit it."""
    max_output_tokens: Annotated[Any, OptionSpec(apis=_RESPONSES, schema=_MAX_TOKENS.json_schema())] = None
    """Largest number of tokens to generate."""
    top_logprobs: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_RESPONSES)] = None
    """Number of most likely tokens to report at each position; needs include."""
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
        OptionSpec(apis=_RESPONSES),
    ] = []
    """List of message.output_text.logprobs and reasoning.encrypted_content. Others belong to tools that it does not run and
    have no effect."""
    text: Annotated[dict[str, Any] | None, OptionSpec(apis=_RESPONSES)] = None
    """Object with format (text, json_object or json_schema) and verbosity, as in chat."""
    tools: Annotated[Any, OptionSpec(apis=_RESPONSES, schema=_OBJECTS)] = None
    """Functions, custom tools, whose format may be text or a grammar, and namespaces of both. Others: see
    --unsupported-tools."""
    tool_choice: Annotated[Any, OptionSpec(apis=_RESPONSES, schema=_choice("none", "auto", "required"))] = None
    """Choice of tools, in the form of chat: auto (default), none, required, a function or custom tool, allowed_tools."""
    parallel_tool_calls: Annotated[bool, OptionSpec(apis=_RESPONSES)] = True
    """false: the answer ends with its first call."""
    max_tool_calls: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX, apis=_RESPONSES)] = None
    """Repeated in the response; it counts tools that the server would run."""
    reasoning: Annotated[dict[str, Any] | None, OptionSpec(apis=_RESPONSES)] = None
    """Object with effort, as reasoning_effort in chat; summary is taken, and the whole reasoning is shown."""
    store: Annotated[bool | None, OptionSpec(apis=_RESPONSES)] = None
    """false: do not keep the response. Default: true, unless the server keeps none."""
    previous_response_id: Annotated[str | None, OptionSpec(apis=_RESPONSES)] = None
    """Continue the conversation of a stored response."""
    stream_options: Annotated[ResponsesStreamOptions | None, OptionSpec(apis=_RESPONSES)] = None
    """Object with include_obfuscation, which may only be false."""
    metadata: Annotated[dict[str, str], OptionSpec(min=0, max=512, labels=True, apis=_RESPONSES)] = {}
    """Up to 16 strings by name, repeated in the response."""
    chat_template_kwargs: Annotated[dict[str, Any], OptionSpec(apis=api("vLLM", "responses"))] = {}
    """Further variables for the chat template."""
    user: Annotated[str | None, OptionSpec(apis=_RESPONSES)] = None
    """Repeated in the response; otherwise as in chat."""
    safety_identifier: Annotated[str | None, OptionSpec(apis=_RESPONSES)] = None
    """Repeated in the response."""
    prompt_cache_key: Annotated[str | None, OptionSpec(apis=_RESPONSES)] = None
    """Repeated in the response; every equal prefix is found in the cache."""


class GenerateBody(SampledBody, frozen=True, kw_only=True):
    """A prompt, or a list of them, of SGLang's API."""

    text: Annotated[Any, OptionSpec(apis=_GENERATE, schema=_one_or_several({"type": "string"}))] = None
    """Prompt, or list of prompts. Either text or input_ids."""
    input_ids: Annotated[Any, OptionSpec(apis=_GENERATE, schema=_one_or_several(_TOKEN_IDS))] = None
    """Token ids of the prompt, or list of prompts."""
    sampling_params: Annotated[Any, OptionSpec(apis=_GENERATE, schema=_one_or_several(_OBJECT))] = {}
    """Object of sampling parameters by SGLang's names, or a list with one for each prompt."""
    rid: Annotated[Any, OptionSpec(apis=_GENERATE, schema=_one_or_several({"type": "string"}))] = None
    """Name of the request in meta_info and for /abort_request, or a list with one for each prompt."""
    return_logprob: Annotated[bool, OptionSpec(apis=_GENERATE)] = False
    """Add output_token_logprobs to meta_info."""
    top_logprobs_num: Annotated[int, OptionSpec(min=0, max=INT32_MAX, apis=_GENERATE)] = 0
    """Number of most likely tokens to report at each position; needs return_logprob."""
    logprob_start_len: Annotated[int, OptionSpec(min=-1, max=INT32_MAX, apis=_GENERATE)] = -1
    """First prompt token to report in input_token_logprobs; needs return_logprob. -1: no token of the prompt."""
    return_text_in_logprobs: Annotated[bool, OptionSpec(apis=_GENERATE)] = False
    """Add the text of each token to its logprobs."""
    return_routed_experts: Annotated[bool, OptionSpec(apis=_GENERATE)] = False
    """Add routed_experts to meta_info: the experts of a mixture that were chosen for each token. Needs
    --enable-return-routed-experts."""
    routed_experts_start_len: Annotated[int, OptionSpec(min=0, max=INT32_MAX, apis=_GENERATE)] = 0
    """First token of routed_experts; at most the tokens of the prompt."""
    start_weight_version: Annotated[int | None, OptionSpec(min=0, max=INT64_MAX, apis=_GENERATE)] = None
    """Number that abort_below_start_weight_version of /pause_generation compares. Default: that of the weights that serve when
    the request arrives."""
    lora_path: Annotated[str | None, OptionSpec(min=1, max=256, apis=_GENERATE)] = None
    """Name of a loaded LoRA adapter. Default: the model's own weights."""


class InferenceBody(SampledBody, frozen=True, kw_only=True):
    """A prompt of tokens of vLLM's API, which is answered in tokens."""

    token_ids: Annotated[list[int], OptionSpec(min=0, max=INT32_MAX, empty=False, apis=_INFERENCE)]
    """Token ids of the prompt."""
    sampling_params: Annotated[dict[str, Any], OptionSpec(apis=_INFERENCE)] = {}
    """Object of sampling parameters, with the names that they have in completions."""
    request_id: Annotated[str | None, OptionSpec(min=1, max=256, apis=_INFERENCE)] = None
    """Name of the request in the answer and for /abort_request."""
    stream_options: Annotated[StreamOptions | None, OptionSpec(apis=_INFERENCE)] = None
    """Object with include_usage and continuous_usage_stats."""
    return_routed_experts: Annotated[
        bool | None, OptionSpec(default="true with --enable-return-routed-experts", apis=api("headrace", "inference"))
    ] = None
    """Add routed_experts to choices: the experts of a mixture that were chosen for each token."""
    routed_experts_format: Annotated[Literal["npy", "raw"], OptionSpec(apis=api("headrace", "inference"))] = "npy"
    """npy: a NumPy file in base64, as in vLLM. raw: an object of data, shape, start and dtype, as in prime-rl."""


class LoadLoraBody(RequestBody, frozen=True, kw_only=True):
    """Fields of vLLM's and SGLang's requests to load an adapter."""

    lora_name: Annotated[str, OptionSpec(min=1, max=256)]
    """Name that requests use."""
    lora_path: Annotated[str, OptionSpec(min=1)]
    """Directory of the adapter in --lora-root, relative to it or absolute."""
    lora_int_id: Annotated[int | None, OptionSpec(min=1, max=INT64_MAX)] = None
    """Number of the adapter, which unloading it may repeat."""
    load_inplace: bool = False
    """Replace the adapter that has the name. Requests that run with it go on."""
    is_3d_lora_weight: bool | None = None
    """Whether the adapter has stacked experts (target_parameters); the files must agree. Default: as the files say."""
    pinned: bool = False
    """SGLang's field: must be false, since all adapters share the places on the device. None leaves the host's memory before it
    is unloaded."""


class UnloadLoraBody(RequestBody, frozen=True, kw_only=True):
    lora_name: Annotated[str, OptionSpec(min=1, max=256)]
    """Name of the adapter."""
    lora_int_id: Annotated[int | None, OptionSpec(min=1, max=INT64_MAX)] = None
    """Number with which it was loaded."""


class TokenizeBody(RequestBody, frozen=True, kw_only=True):
    """Either a prompt or messages."""

    model: str | None = None
    """Name of the model, one of /v1/models. Default: the model that is served."""
    prompt: str | None = None
    """Text."""
    messages: Annotated[Any, OptionSpec(schema={**_OBJECTS, "minItems": 1})] = None
    """Conversation, as in chat."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. Default: true for a prompt, as in completions; false for messages, as in chat."""
    add_generation_prompt: bool | None = None
    """End the prompt with the start of the assistant's turn. Default: true."""
    continue_final_message: bool | None = None
    """Continue the last message instead of starting a new turn."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's processor of pictures and videos."""
    return_token_strs: bool = False
    """Add token_strs, the text of each token, to the answer."""


class DetokenizeBody(RequestBody, frozen=True, kw_only=True):
    model: str | None = None
    """Name of the model, one of /v1/models. Default: the model that is served."""
    tokens: Annotated[list[int], OptionSpec(min=0, max=INT32_MAX)]
    """Token ids."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text."""


class AbortBody(RequestBody, frozen=True, kw_only=True):
    """Names of requests of /generate and /inference/v1/generate, or all of the caller's."""

    rid: Annotated[list[str] | None, OptionSpec(min=0, max=256, single=True)] = None
    """Name of the request, or a list of names. An empty name is none."""
    abort_all: bool = False
    """Abort every request of the API key; where there are no keys, of all clients."""


class OllamaBody(RequestBody, frozen=True, kw_only=True):
    """Fields that /api/chat and /api/generate share, which shape/ollama.py reads."""

    model: str
    """Name of the model, one of /api/tags; `:latest` behind it is left out."""
    stream: bool = True
    """Answer with a line of JSON for each piece of the answer."""
    format: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "string", "enum": ["json"]}, _OBJECT]})] = None
    """json, or a JSON schema that the answer follows."""
    options: Annotated[Any, OptionSpec(schema=_OBJECT)] = None
    """Sampling parameters, by Ollama's names."""
    think: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "boolean"}, {"type": "string"}]})] = None
    """Whether the model reasons before it answers, or a reasoning effort: low, medium, high, max."""
    keep_alive: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "string"}, {"type": "number"}]})] = None
    """Time for which the model stays loaded after the answer, where the server has several: seconds, or a duration such as 5m;
    negative: for ever. A server of one model keeps it, and refuses a request without a prompt that asks to unload it (0)."""
    logprobs: bool = False
    """Report log-probabilities of the generated tokens."""
    top_logprobs: Annotated[int | None, OptionSpec(min=0, max=INT32_MAX)] = None
    """Number of most likely tokens to report at each position; needs logprobs."""
    truncate: bool = False
    """May only be false: no part of a prompt is cut off."""
    shift: bool = False
    """May only be false: an answer ends where the context is full."""


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    messages: Annotated[Any, OptionSpec(schema=_OBJECTS)] = None
    """Conversation: role, content, thinking, images, tool_calls, tool_name. Without one, the answer says that the model is
    loaded."""
    tools: Annotated[Any, OptionSpec(schema=_OBJECTS)] = None
    """Functions that the model may call."""


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    prompt: str = ""
    """The user's message, or with raw or suffix the text to go on from. Without one, the answer says that the model is
    loaded."""
    suffix: str = ""
    """Text that follows the generated one: the model fills in the middle."""
    system: str = ""
    """System message before the prompt."""
    images: list[str] = []
    """Pictures of the prompt in base64."""
    raw: bool = False
    """Go on from the prompt as it is, without the chat template."""
    context: list[int] = []
    """May only be empty: /api/chat takes whole conversations."""
    template: str = ""
    """May only be empty: the template is the server's (--chat-template)."""


class OllamaShowBody(RequestBody, frozen=True, kw_only=True):
    model: str | None = None
    """Name of the model."""
    name: str | None = None
    """Older name of model."""
    verbose: bool = False
    """Has no effect: the answer is always complete."""


class OllamaPullBody(RequestBody, frozen=True, kw_only=True):
    model: str | None = None
    """Model of the hub: a repository, or REPO:Q4_K_M for one of its GGUF files."""
    name: str | None = None
    """Older name of model."""
    stream: bool = True
    """Report the progress in lines of JSON."""
    insecure: bool = False
    """May only be false: the hub is asked over HTTPS."""


BODIES: Mapping[Endpoint, type[RequestBody]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "messages": MessagesBody,
    "count_tokens": CountTokensBody,
    "responses": ResponsesBody,
    "generate": GenerateBody,
    "inference": InferenceBody,
}


def applied_options(endpoint: Endpoint) -> Mapping[str, Option]:
    """The declarations of the fields that an endpoint applies, by name."""
    owners: tuple[Any, ...] = (BODIES[endpoint], SamplingParams, Request, ConstraintFields)
    declared = (option for owner in owners for option in options(owner).values())
    return {option.name: option for option in declared if endpoint in option.spec.apis}
