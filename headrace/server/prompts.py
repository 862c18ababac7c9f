"""The prompts of a completions request, and their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.server.errors import ApiError
from headrace.server.schema import INT32
from headrace.server.state import Serving

# Tokenising this many characters takes about as long as a step may: longer texts are tokenised in a thread.
_THREAD_CHARACTERS = 16_384


def parse_prompts(value: Any, limit: int) -> list[str | list[int]]:
    """A string, a list of strings, token ids, or a list of lists of token ids -> a list of prompts.

    Raises:
        ApiError: 400; ``param`` names the entry that is of the wrong type.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong("prompt", "a string, a list of strings, token ids, or a list of lists of token ids")
    if not value:
        raise ApiError(400, "prompt is an empty list", param="prompt", code="invalid_value")
    if isinstance(value[0], int):
        return [_token_ids("prompt", value)]
    if len(value) > limit:
        raise ApiError(
            400, f"prompt holds {len(value)} prompts, and the limit is {limit}", param="prompt", code="invalid_value"
        )
    if isinstance(value[0], str):
        for index, text in enumerate(value):
            if not isinstance(text, str):
                raise _wrong(f"prompt[{index}]", "a string, like the first prompt")
        return value
    return [_token_ids(f"prompt[{index}]", ids) for index, ids in enumerate(value)]


def _token_ids(where: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _wrong(where, "a list of token ids")
    if not value:
        raise ApiError(400, f"{where} is empty", param=where, code="invalid_value")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= INT32:
            raise _wrong(f"{where}[{index}]", "a token id")
    return value


def _wrong(where: str, expected: str) -> ApiError:
    return ApiError(400, f"{where} must be {expected}", param=where, code="invalid_type")


def need_tokenizer(serving: Serving, param: str) -> Any:
    """The engine's tokenizer, for a request that brings text."""
    if serving.llm.tokenizer is None:
        raise ApiError(400, f"{param}: this server runs without a tokenizer and takes token ids only", param=param)
    return serving.llm.tokenizer


async def encode(serving: Serving, text: str, add_special_tokens: bool, param: str, *, bounded: bool = True) -> list[int]:
    """Tokens of a text; a long one does not hold up the other requests meanwhile.

    Raises:
        ApiError: 400 if ``bounded`` and the text cannot fit in the context, whatever its tokens are.
    """
    tokenizer = need_tokenizer(serving, param)
    if bounded and len(text) > serving.model.max_characters:
        message = f"{param}: {len(text)} characters cannot fit in a context of {serving.model.max_model_len} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    if len(text) <= _THREAD_CHARACTERS:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
