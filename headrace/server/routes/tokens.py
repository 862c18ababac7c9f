"""POST /tokenize, POST /detokenize"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.server.body import Caller, caller
from headrace.server.errors import JSON
from headrace.server.generation import cancel_on_disconnect
from headrace.server.prompts import need_tokenizer, render_messages
from headrace.server.request import posts
from headrace.server.sampling import limit
from headrace.server.schema import DetokenizeBody, TokenizeBody
from headrace.server.state import Serving

router = APIRouter()
_OF_MESSAGES = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "mm_processor_kwargs")


@posts(router, "/tokenize", kind=TokenizeBody)
async def tokenize(request: Request, state: Serving, body: TokenizeBody) -> Response:
    """Tokens of a prompt or of a conversation, as the completions endpoints would make them."""
    state.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    return await cancel_on_disconnect(state, request.receive, _tokenized(state, body, caller(request)))


async def _tokenized(state: Serving, body: TokenizeBody, sender: Caller) -> Response:
    tokenizer, inputs, texts = need_tokenizer(state, "prompt"), state.llm.inputs, state.model.texts
    if body.messages is not None:
        rendered = await inputs.in_thread(sender.turn, lambda: render_messages(state, body))
        special, find = bool(body.add_special_tokens), state.features.finder(sender.tenant)
        ids = await rendered.token_ids(state, sender, find, add_special_tokens=special)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        if given := [name for name in _OF_MESSAGES if getattr(body, name) is not None]:
            raise RequestError(f"{given[0]} needs messages", given[0])
        inputs.check_length(text, "prompt")
        ids = await inputs.in_thread(sender.turn, lambda: tokenizer.encode(text, add_special_tokens=special, param="prompt"))

    def answer() -> dict[str, Any]:
        shaped = {"count": len(ids), "max_model_len": state.model.max_model_len, "tokens": ids}
        return shaped | {"token_strs": [texts.text(token) for token in ids]} if body.return_token_strs else shaped

    return JSON(await inputs.in_thread(sender.turn, answer))


@posts(router, "/detokenize", kind=DetokenizeBody)
async def detokenize(request: Request, state: Serving, body: DetokenizeBody) -> Response:
    """The text of tokens."""
    state.adapter(body.model)
    tokenizer, inputs = need_tokenizer(state, "tokens"), state.llm.inputs
    limit("tokens", len(body.tokens), inputs.max_prompt_chars, "max_prompt_chars")

    def decode() -> str:
        if body.tokens and max(body.tokens) >= inputs.vocab_size:
            index, token = next((i, token) for i, token in enumerate(body.tokens) if token >= inputs.vocab_size)
            message = f"tokens[{index}] is {token}, and the vocabulary has {inputs.vocab_size} tokens"
            raise RequestError(message, f"tokens[{index}]")
        text: str = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return text

    text = await cancel_on_disconnect(state, request.receive, inputs.in_thread(caller(request).turn, decode))
    return JSON({"prompt": text})
