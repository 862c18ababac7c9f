"""The prompts of a request: the shapes that completions take, and conversations."""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.core.request import Request
from headrace.errors import RequestError, unsupported, wrong_type
from headrace.frontend.inputs import MultiModalPrompt, Prompt
from headrace.options import INT32_MAX
from headrace.server.body import Caller
from headrace.server.sampling import limit
from headrace.server.schema import ChatBody, CompletionBody, TokenizeBody
from headrace.server.state import Serving
from headrace.text.answers import AnswerFormats
from headrace.text.content import ConversationMedia, MediaPart, blame_part
from headrace.text.effort import EffortVariables
from headrace.text.transcript import Transcript

if TYPE_CHECKING:
    from headrace.multimodal.media import FindFeatures


_TRUSTED = ("system", "developer", "assistant")
"""Roles whose messages may spell special tokens."""


def parse_prompts(value: Any, most: int, name: str = "prompt") -> list[str | list[int]]:
    """A string, a list of strings, token ids, or a list of lists of token ids -> a list of prompts.

    Args:
        name: of the field.

    Raises:
        RequestError: ``param`` names the entry that is of the wrong type.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type(name, "a string, a list of strings, token ids, or a list of lists of token ids")
    if not value:
        raise RequestError(f"{name} is an empty list", name)
    if isinstance(value[0], int):
        return [_token_ids(name, value)]
    limit(name, len(value), most, "max_prompts")
    if isinstance(value[0], str):
        for index, text in enumerate(value):
            if not isinstance(text, str):
                raise wrong_type(f"{name}[{index}]", f"a string, like the first {name}")
        return value
    return [_token_ids(f"{name}[{index}]", ids) for index, ids in enumerate(value)]


def engine_prompt(serving: Serving, prompt: str | list[int], body: CompletionBody) -> Prompt:
    """The engine's prompt of a prompt, with the ``suffix`` behind it where there is one.

    Raises:
        RequestError: the model cannot fill in the middle, or the prompt or suffix is too long.
    """
    if isinstance(prompt, str):
        need_tokenizer(serving, "prompt")
    if not body.suffix:
        return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    need_tokenizer(serving, "suffix")
    if body.echo:
        raise unsupported("suffix", "suffix and echo cannot be combined")
    fim = serving.model.fim
    if fim is None:
        raise unsupported("suffix", "suffix is not supported: the model's vocabulary has no tokens for filling in the middle")
    inputs = serving.llm.inputs
    tokens = fim.prompt(
        prompt,
        body.suffix,
        lambda text, param: inputs.encode(text, add_special_tokens=False, param=param),
        add_special_tokens=body.add_special_tokens,
    )
    return {"prompt_token_ids": tokens}


def _token_ids(where: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong_type(where, "a list of token ids")
    if not value:
        raise RequestError(f"{where} is empty", where)
    if not set(map(type, value)) <= {int} or not 0 <= min(value) <= max(value) <= INT32_MAX:
        wrong = (index for index, token in enumerate(value) if type(token) is not int or not 0 <= token <= INT32_MAX)
        raise wrong_type(f"{where}[{next(wrong)}]", "a token id")
    return value


class RenderedChat(NamedTuple):
    """A conversation as the chat template writes it."""

    parts: Sequence[str]
    """Texts in a row; no token has characters of two of them."""
    media: Sequence[MediaPart]
    """Media in the order of their placeholders in the text."""
    kwargs: Mapping[str, Any]
    """``mm_processor_kwargs``"""
    transcript: Transcript | None = None
    """Text and tokens of earlier turns: its tokens are the prompt's where the prompt begins with its text."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @asynccontextmanager
    async def prompt(
        self, serving: Serving, sender: Caller, find: FindFeatures | None, *, add_special_tokens: bool = False
    ) -> AsyncIterator[Prompt]:
        """The engine's prompt, its media loaded for as long as the block lasts. Errors of media name their parts.

        Args:
            sender: whose request it is.
            find: finds uploaded features.

        Raises:
            RequestError: a medium cannot be had, or exceeds a limit.
            QueueFullError: there is no room for them now.
        """
        inputs = serving.llm.inputs
        loader, text = inputs.media, self.text
        tokens: list[int] | None = None
        inputs.check_length(text, "messages")
        if self.transcript is not None and not self.media:
            continued = functools.partial(self.transcript.continued, need_tokenizer(serving, "messages"), self.parts)
            tokens = await inputs.in_thread(sender.turn, continued)
        if tokens is None and len(self.parts) > 1:
            encode = functools.partial(need_tokenizer(serving, "messages").encode_parts, param="messages")
            tokens = await inputs.in_thread(sender.turn, lambda: encode(self.parts, add_special_tokens))
        if not self.media or loader is None:
            yield text if tokens is None else {"prompt": text, "prompt_token_ids": tokens}
            return
        async with loader.loaded(self.media, find, sender.tenant) as data:
            full: MultiModalPrompt = {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": self.kwargs}
            if tokens is not None:
                full["prompt_token_ids"] = tokens
            try:
                yield full
            except RequestError as error:
                if not blame_part(error, self.media) and (error.param or "").startswith("multi_modal_data"):
                    error.param = "messages"  # The template has not written a placeholder for each medium.
                raise

    async def token_ids(
        self, serving: Serving, sender: Caller, find: FindFeatures | None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """The tokens of the prompt. Raises: as ``prompt``."""
        inputs = serving.llm.inputs
        async with self.prompt(serving, sender, find, add_special_tokens=add_special_tokens) as prompt:
            if isinstance(prompt, str):
                tokenizer = need_tokenizer(serving, "messages")
                encode = functools.partial(tokenizer.encode, add_special_tokens=add_special_tokens, param="messages")
                ids: list[int] = await inputs.in_thread(sender.turn, lambda: encode(prompt))
                return ids
            return await inputs.in_thread(
                sender.turn,
                lambda: inputs.prompt_token_ids(prompt, add_special_tokens=add_special_tokens, tenant=sender.tenant),
            )


def render_messages(serving: Serving, body: ChatBody | TokenizeBody, tools: Sequence[Mapping[str, Any]] = ()) -> RenderedChat:
    """The prompt of a conversation. Takes long for large ones: call it beside the event loop.

    Raises:
        RequestError: 400, naming the message and its field at fault.
    """
    if isinstance(body.messages, list):
        limit("messages", len(body.messages), serving.settings.max_messages, "max_messages")
    template = getattr(body, "chat_template", None)
    if template is not None and not serving.settings.trust_request_chat_template:
        message = "chat_template is not supported: the template is the server's, without --trust-request-chat-template"
        raise unsupported("chat_template", message)
    for name in ("messages", "chat_template_kwargs", "mm_processor_kwargs"):
        _check_values(name, getattr(body, name), serving.settings.max_chat_values)
    _check_values("tools", list(tools), serving.settings.max_chat_values)
    messages, answers = body.messages, serving.llm.inputs.answers
    if answers is not None and answers.tools is not None and answers.tools.ids == "alphanumeric9":
        messages = _with_short_ids(messages)
    mark = ""
    if serving.settings.escape_special_tokens == "user":
        mark = secrets.token_hex(8)
        messages = _escaped(messages, serving.llm.inputs.special_texts, mark)
    processor = serving.llm.inputs.multimodal
    media = None if processor is None else ConversationMedia(processor.neutral, processor.written)
    kwargs = body.mm_processor_kwargs or {}
    serving.llm.inputs.check_processor_options(kwargs)
    text = need_tokenizer(serving, "messages").render_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs={**_effort_variables(body, answers), **(body.chat_template_kwargs or {})},
        strict=True,
        **({"tools": tools} if tools else {}),
        **({"media": media} if media is not None else {}),
        **({"template": template} if template is not None else {}),
        **({"spell_tools": True} if answers is not None and answers.spells_tools else {}),
    )
    parts = text.split(mark) if mark else [text]
    return RenderedChat(parts, () if media is None else media.parts, kwargs)


def _escaped(messages: Any, specials: Sequence[str], mark: str) -> Any:
    """Messages with a mark behind the first character of each special token that users and tools spell."""
    several = [text for text in specials if len(text) > 1]
    spelled = re.compile("|".join(map(re.escape, sorted(several, key=len, reverse=True))) or "(?!)")

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return spelled.sub(lambda found: found[0][:1] + mark + found[0][1:], value)
        if isinstance(value, list):
            return [escaped(item) for item in value]
        if isinstance(value, Mapping) and isinstance(value.get("text"), str):
            return {**value, "text": escaped(value["text"])}
        return value

    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": escaped(message.get("content"))}
        if isinstance(message, Mapping) and message.get("role") not in _TRUSTED
        else message
        for message in messages
    ]


def _effort_variables(body: ChatBody | TokenizeBody, answers: AnswerFormats | None) -> dict[str, Any]:
    """The chat template's variables that reasoning_effort sets. Raises RequestError."""
    if not isinstance(body, ChatBody) or body.reasoning_effort is None:
        return {}
    variables = (answers.efforts if answers is not None else EffortVariables()).set_by(body.reasoning_effort)
    for name, value in variables.items():
        if body.chat_template_kwargs.get(name, value) != value:
            message = f"reasoning_effort {body.reasoning_effort} and chat_template_kwargs.{name} contradict each other"
            raise RequestError(message, "reasoning_effort")
    return variables


def _check_values(name: str, value: Any, most: int) -> None:
    """Raises RequestError where a JSON value holds more than ``most`` others; it looks at no more than those."""
    left, found = [value], 0
    while left:
        value = left.pop()
        if isinstance(value, (dict, list)):
            found += len(value)
            if found > most:
                raise RequestError(f"{name} has more than {most} values, nested ones included (max_chat_values)", name)
            left.extend(value.values() if isinstance(value, dict) else value)


def check_prompt_logprobs(serving: Serving, requests: Sequence[Request], copies: int) -> None:
    """Bounds the part of an answer that repeats for each prompt token.

    Args:
        copies: how often the answer has the logprobs of a prompt.

    Raises:
        RequestError: the answer would have too many.
    """
    sampling = requests[0].sampling
    if sampling.prompt_logprobs is None:
        return
    count = serving.llm.inputs.vocab_size if sampling.prompt_logprobs == -1 else sampling.prompt_logprobs
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    total, most = tokens * (count + 1) * copies, serving.settings.max_prompt_logprobs
    if total > most:
        message = (
            f"{tokens} prompt tokens with {count} + 1 logprobs each, {copies} times, are {total}; at most {most} are allowed "
            "(max_prompt_logprobs)"
        )
        raise RequestError(message, "prompt_logprobs")


def _with_short_ids(messages: Any) -> Any:
    """Messages whose tool call ids have 9 letters and digits: Mistral's templates take no others. They are checked later."""
    if isinstance(messages, Mapping):
        ids = {name: _short_id(messages[name]) for name in ("id", "tool_call_id") if isinstance(messages.get(name), str)}
        calls = {"tool_calls": _with_short_ids(messages["tool_calls"])} if messages.get("tool_calls") else {}
        return {**messages, **ids, **calls}
    return [_with_short_ids(message) for message in messages] if isinstance(messages, list) else messages


def _short_id(identity: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", identity):
        return identity
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def need_tokenizer(serving: Serving, param: str) -> Any:
    """The engine's tokenizer, for a request that brings text."""
    if serving.llm.tokenizer is None:
        raise RequestError(f"{param}: this server runs without a tokenizer and takes token ids only", param)
    return serving.llm.tokenizer
