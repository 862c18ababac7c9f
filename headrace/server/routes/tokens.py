"""POST /tokenize, POST /detokenize"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.errors import JSON, ApiError
from headrace.server.prompts import need_tokenizer, render_messages
from headrace.server.request import body_schema, checked_body
from headrace.server.schema import DetokenizeBody, TokenizeBody
from headrace.server.state import serving

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Tokens of a prompt or of a conversation, as the completions endpoints would make them."""
    state = serving(request)
    body = await checked_body(request, state, TokenizeBody)
    state.model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    chat = body.messages is not None
    text = render_messages(state, body) if chat else body.prompt or ""
    special = body.add_special_tokens if body.add_special_tokens is not None else not chat
    tokens = await asyncio.to_thread(need_tokenizer(state, "prompt").encode, text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": state.model.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [state.model.texts.text(token) for token in tokens]
    return JSON(answer)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    state = serving(request)
    body = await checked_body(request, state, DetokenizeBody)
    state.model.check_name(body.model)
    tokenizer = need_tokenizer(state, "tokens")
    for index, token in enumerate(body.tokens):
        if token >= state.model.vocab_size:
            message = f"tokens[{index}] is {token}, and the vocabulary has {state.model.vocab_size} tokens"
            raise ApiError(400, message, param=f"tokens[{index}]", code="invalid_value")
    return JSON({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)})
