"""POST /v1/messages, POST /v1/messages/count_tokens"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.answers import Begun, answers
from headrace.server.body import Caller, caller
from headrace.server.errors import JSON
from headrace.server.generation import cancel_on_disconnect
from headrace.server.prompts import RenderedChat, need_tokenizer, render_messages
from headrace.server.request import posts, trusted_body
from headrace.server.routes.chat import chat_generation
from headrace.server.schema import ChatBody, CountTokensBody, MessagesBody
from headrace.server.shape.messages import NAMES, MessagesAnswer, chat_request
from headrace.server.shape.turns import renamed
from headrace.server.state import Serving
from headrace.server.tools import offered

router = APIRouter()


@answers(router, "/v1/messages", "msg_", MessagesBody, "messages")
async def messages(state: Serving, body: MessagesBody, message_id: str, caller: Caller) -> Begun:
    """Answers a conversation in the shape of Anthropic's API."""
    with renamed(NAMES, "input_schema"):
        read = await chat_request(body, state, caller.turn)
    with renamed(NAMES, "input_schema", read.tools):
        chat = trusted_body(read.fields, ChatBody)
        generation = await chat_generation(state, chat, message_id, caller, room=body.max_tokens)
    return generation, MessagesAnswer(body, state, generation, message_id)


@posts(router, "/v1/messages/count_tokens", kind=CountTokensBody, endpoint="count_tokens")
async def count_tokens(request: Request, state: Serving, body: CountTokensBody) -> Response:
    """The number of tokens in the prompt of a conversation."""
    state.adapter(body.model)
    need_tokenizer(state, "messages")
    count = await cancel_on_disconnect(state, request.receive, _count(state, body, caller(request)))
    return JSON({"input_tokens": count})


async def _count(state: Serving, body: CountTokensBody, sender: Caller) -> int:
    with renamed(NAMES, "input_schema"):
        read = await chat_request(body, state, sender.turn)
    with renamed(NAMES, "input_schema", read.tools):
        chat = trusted_body(read.fields, ChatBody)

        def rendered() -> RenderedChat:
            return render_messages(state, chat, offered(chat, state.llm.inputs.answers, state.settings).schemas)

        found = await state.llm.inputs.in_thread(sender.turn, rendered)
        return len(await found.token_ids(state, sender, state.features.finder(sender.tenant)))
