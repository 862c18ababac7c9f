"""POST /api/chat, /api/generate, /api/show; GET /api/tags, /api/ps, /api/version: Ollama's API."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.engine.info import EngineInfo
from headrace.errors import RequestError, missing, unsupported
from headrace.server.answers import AnswerRoute, Begun
from headrace.server.body import Caller
from headrace.server.errors import JSON
from headrace.server.generation import Generation
from headrace.server.request import posts, trusted_body
from headrace.server.routes.chat import chat_generation
from headrace.server.routes.completions import completions
from headrace.server.schema import ChatBody, CompletionBody, OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from headrace.server.shape.ollama import (
    NAMES,
    OllamaAnswer,
    chat_messages,
    common_fields,
    duration,
    is_load,
    nothing_generated,
    thinking_fields,
)
from headrace.server.shape.turns import late_system, renamed
from headrace.server.state import Serving, described, fingerprint
from headrace.sources.pooling import EmbeddingConfig

router = APIRouter()

_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients compare it."""
NEVER = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded that stays."""


async def _chat(state: Serving, body: OllamaChatBody | OllamaGenerateBody, request_id: str, caller: Caller) -> Begun:
    late = await late_system(state, caller.turn)

    def read() -> tuple[ChatBody, int | None]:
        fields, room = common_fields(body, state)
        fields |= thinking_fields(body, state)
        messages = fields["messages"] = chat_messages(body, late)
        # A last turn of the assistant is the beginning of the answer.
        fields["continue_final_message"] = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        if isinstance(body, OllamaChatBody) and body.tools:
            fields["tools"] = body.tools
        return trusted_body(fields | _logprobs(body), ChatBody), room

    names = NAMES if isinstance(body, OllamaChatBody) else NAMES | {"messages": "prompt"}
    with renamed(names):
        chat, room = await state.llm.inputs.in_thread(caller.turn, read)
        generation = await chat_generation(state, chat, request_id, caller, room=room)
    return generation, OllamaAnswer(body, state, generation)


async def _generate(state: Serving, body: OllamaGenerateBody, request_id: str, caller: Caller) -> Begun:
    if not (body.raw or body.suffix):
        return await _chat(state, body, request_id, caller)
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise RequestError(f"{name} needs the chat template: leave raw and suffix out", name)
    with renamed(NAMES):
        fields, room = common_fields(body, state)
        fields |= {"prompt": body.prompt, "suffix": body.suffix or None}
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        text = trusted_body(fields, CompletionBody)
        generation, _ = await completions.build(state, text, request_id, caller)
    if room is not None:
        limited = (msgspec.structs.replace(one, max_tokens=min(one.max_tokens, room)) for one in generation.requests)
        generation = Generation(state, list(limited))
    return generation, OllamaAnswer(body, state, generation)


def _logprobs(body: OllamaBody) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0} if body.logprobs else {}


_CHAT = AnswerRoute("/api/chat", "chat-", OllamaChatBody, None, _chat)
_GENERATE = AnswerRoute("/api/generate", "generate-", OllamaGenerateBody, None, _generate)


@posts(router, _CHAT.url, kind=OllamaChatBody)
async def chat(request: Request, state: Serving, body: OllamaChatBody) -> Response:
    """Answers a conversation, in lines of JSON unless stream is false."""
    return await _answered(request, state, body, _CHAT)


@posts(router, _GENERATE.url, kind=OllamaGenerateBody)
async def generate(request: Request, state: Serving, body: OllamaGenerateBody) -> Response:
    """Answers a prompt, or goes on from it."""
    return await _answered(request, state, body, _GENERATE)


async def _answered(request: Request, state: Serving, body: Any, route: AnswerRoute[Any]) -> Response:
    known_name(state, body.model)
    keep_alive = duration(body.keep_alive)
    if not is_load(body):
        return await route.answer(request, state, body)
    if keep_alive == 0 and not state.unloads:
        raise unsupported("keep_alive", "keep_alive: this server keeps its model loaded until it ends")
    return JSON(nothing_generated(body.model, "unload" if keep_alive == 0 else "load", chat=route is _CHAT))


@router.get("/api/version")
async def version() -> Response:
    """The version of Ollama whose API this is."""
    return JSON({"version": _VERSION})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The names under which the model is served."""
    state = described(request)
    return JSON({"models": [tag(name, state.llm.info, state.created, gguf=is_gguf(state)) for name in state.model.names]})


@router.get("/api/ps")
async def loaded(request: Request) -> Response:
    """The model, which is loaded as long as the server runs."""
    state = described(request)
    return JSON({"models": [running(name, state.llm.info, NEVER, gguf=is_gguf(state)) for name in state.model.names]})


@posts(router, "/api/show", kind=OllamaShowBody)
async def show(request: Request, state: Serving, body: OllamaShowBody) -> Response:
    """Describes the model: its template, context and capabilities."""
    if (name := body.model or body.name) is None:
        raise missing("model")
    known_name(state, name)
    described = description(state.llm.info, state.created, _capabilities(state), gguf=is_gguf(state))
    parameters = "\n".join(f"{name} {value}" for name, value in state.model.default_sampling_params.items())
    return JSON(described | {"parameters": parameters, "template": _template(state)})


def description(info: EngineInfo, created: float, capabilities: Sequence[str], *, gguf: bool) -> dict[str, Any]:
    """The answer of /api/show, without what only the model's tokenizer and defaults tell."""
    family = _family(info)
    return {
        "modelfile": f"FROM {info.model}\n",
        "parameters": "",
        "template": "",
        "details": _details(info, gguf),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": info.max_model_len,
            f"{family}.block_count": len(info.layers),
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": timestamp(created),
    }


def planned_capabilities(info: EngineInfo) -> list[str]:
    """The capabilities of a model that is not loaded, as far as its report tells."""
    decided = {decision.name: decision.value for decision in info.decisions}
    generates = "generate" in decided.get("task", "generate")  # Without a tokenizer the report does not say it.
    found = {
        "completion": generates,
        "embedding": not generates,
        "tools": generates and decided.get("tool calls", "none") != "none",
        "thinking": generates and decided.get("reasoning", "none") != "none",
        "vision": info.media is not None,
    }
    return [name for name, there in found.items() if there]


def known_name(state: Serving, name: str) -> str:
    """A name of the model without the tag that Ollama's clients write behind names without one.

    Raises: ApiError 404.
    """
    known = name if name in state.model.names else name.removesuffix(":latest")
    state.model.check_name(known)
    return known


def tag(name: str, info: EngineInfo, created: float, *, gguf: bool) -> dict[str, Any]:
    """A model of /api/tags."""
    return _card(name, info, gguf) | {"modified_at": timestamp(created)}


def running(name: str, info: EngineInfo, expires_at: str, *, gguf: bool) -> dict[str, Any]:
    """A model of /api/ps."""
    on_gpu = info.weight_bytes if info.device.startswith("cuda") else 0
    more = {"expires_at": expires_at, "size_vram": on_gpu, "context_length": info.max_model_len}
    return _card(name, info, gguf) | more


def _card(name: str, info: EngineInfo, gguf: bool) -> dict[str, Any]:
    digest = hashlib.sha256(f"{name} {fingerprint(info)}".encode()).hexdigest()
    return {"name": name, "model": name, "size": info.weight_bytes, "digest": digest, "details": _details(info, gguf)}


def _details(info: EngineInfo, gguf: bool) -> dict[str, Any]:
    family = _family(info)
    stored = info.dtype if info.quantization == "none" else info.quantization
    return {
        "parent_model": "",
        "format": "gguf" if gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": stored.upper(),
    }


def is_gguf(state: Serving) -> bool:
    """Whether the weights of a loaded model come from a GGUF file."""
    return state.llm.text.files.gguf_file is not None


def _family(info: EngineInfo) -> str:
    """The architecture without its head: Qwen3ForCausalLM is qwen3."""
    return info.architecture.partition("For")[0].lower()


def timestamp(seconds: float) -> str:
    """Seconds since the epoch, as Ollama writes a time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _template(state: Serving) -> str:
    """The chat template; of several, the one that has no other name."""
    template = None if state.llm.tokenizer is None else state.llm.tokenizer.hf.chat_template
    return str(template.get("default", "") if isinstance(template, dict) else template or "")


def _capabilities(state: Serving) -> list[str]:
    formats, embedding = state.llm.inputs.answers, state.llm.pooling.config.embedding
    found = {
        "completion": state.llm.inputs.no_text is None,
        "embedding": isinstance(embedding, EmbeddingConfig) and embedding.described,
        "tools": formats is not None and formats.tools is not None and (formats.renders_tools or formats.spells_tools),
        "thinking": formats is not None and formats.reasons,
        "vision": state.llm.info.media is not None,
        "insert": state.model.fim is not None,
    }
    return [name for name, there in found.items() if there]
