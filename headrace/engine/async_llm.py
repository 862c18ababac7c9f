"""AsyncLLM: the engine in a process of its own, for servers."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.engine.frontend import Frontend, load_frontend
from headrace.engine.incarnation import COMMAND
from headrace.engine.info import EngineInfo, Progress
from headrace.engine.inputs import InputProcessor, Prompt
from headrace.engine.messages import (
    Abort,
    Accepted,
    AddRequest,
    Control,
    ControlName,
    ControlReply,
    FromEngine,
    Ready,
    Rejected,
    Step,
)
from headrace.engine.streams import Inbox, OutputStream, new_output
from headrace.engine.supervisor import EngineSupervisor, Health
from headrace.errors import ConfigError, EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta, RequestOutput
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.engine")

T = TypeVar("T")
_THREAD_CHARACTERS = 16_384
"""Prompts longer than this are tokenised in a thread, so that the event loop goes on."""


class AsyncLLM:
    """Client of one engine process, which it starts, watches and restarts. Belongs to the event loop that started it.

    ::

        async with AsyncLLM(EngineArgs(model=...)) as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text)
    """

    command: ClassVar[Sequence[str]] = COMMAND
    """Starts the engine's process."""

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        chat_template: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """``chat_template``: a template, or the path of one, in place of the tokenizer's."""
        self.args = args or EngineArgs()
        self._chat_template = chat_template
        self.stats = EngineStats()
        """As of the engine's last step; its counters start again at 0 when the engine restarts."""
        self._supervisor = EngineSupervisor(self.args, self, on_progress=on_progress, command=self.command)
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, tuple[ControlName, asyncio.Future[bool]]] = {}
        self._num_calls = 0
        self._draining = False
        self._info: EngineInfo | None = None
        self._frontend: Frontend | None = None
        self._inputs: InputProcessor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Life

    async def start(self) -> None:
        """Waits until the engine has run its first step.

        Raises:
            ConfigError: the arguments cannot work with this model on this machine.
            EngineError: the engine did not start.
        """
        self._loop = asyncio.get_running_loop()
        try:
            # Both read the model's files, each for its own process.
            loading = asyncio.to_thread(load_frontend, self.args, self._chat_template, prepared=True)
            frontend, info = await asyncio.gather(loading, self._supervisor.start())
            self._inputs = frontend.inputs(self.args, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
            self._frontend = frontend
            self._info = info
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the engine; requests in flight end with an error."""
        await self._supervisor.close()

    async def drain(self) -> None:
        """Takes no more requests, and waits until those in flight have ended.

        Raises: EngineDeadError: the engine died meanwhile; its requests have ended with errors.
        """
        self._draining = True
        await self._call("drain")

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def health(self) -> Health:
        return self._supervisor.health()

    # Facts

    @property
    def info(self) -> EngineInfo:
        return _started(self._info)

    @property
    def inputs(self) -> InputProcessor:
        return _started(self._inputs)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with ``skip_tokenizer_init``."""
        return _started(self._frontend).tokenizer

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine that runs now."""
        return self._supervisor.pid

    # Requests

    async def add(self, request: Request) -> OutputStream:
        """Hands a request to the engine, and returns once it is in the queue.

        Raises:
            RequestError: the engine refuses it, or a request of this id is running.
            QueueFullError: too many requests are waiting.
            EngineDeadError: the engine is not running, or died before it took the request.
        """
        self._supervisor.check()
        if self._draining:
            raise EngineDeadError("the engine is draining and takes no more requests")
        request_id = request.request_id
        if request_id in self._inboxes:
            raise RequestError(f"a request of the id {request_id!r} is running", "request_id")
        inbox = self._inboxes[request_id] = Inbox(request_id, request.sampling.n)
        stream = OutputStream(inbox, self._abandon)
        try:
            self._supervisor.send(AddRequest(request))
            await inbox.accepted
        except (RequestError, EngineDeadError):
            inbox.open.clear()
            self._inboxes.pop(request_id, None)
            raise
        except BaseException:
            # Cancelled: the engine may have taken it all the same.
            await stream.aclose()
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The request's output as it grows: one object, yielded after each delta. Leaving early aborts the request.

        Raises: as ``add``. An engine that dies later shows in ``output.error`` and in finish_reason "error".
        """
        params = params if params is not None else self.inputs.default_sampling
        request_id = request_id if request_id is not None else f"generate-{uuid.uuid4().hex}"

        def make() -> Request:
            return self.inputs.request(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)

        slow = bool(params.bad_words) or (isinstance(prompt, str) and len(prompt) > _THREAD_CHARACTERS)
        request = await asyncio.to_thread(make) if slow else make()
        output = new_output(request)
        async with await self.add(request) as stream:
            async for delta in stream:
                output.add(delta)
                yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request within a step; its stream gets deltas with finish_reason "abort". Unknown ids are ignored."""
        self._abandon_here(request_id)

    def _abandon(self, request_id: str) -> None:
        """Abort from wherever a stream was dropped, the garbage collector of another thread included."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abandon_here, request_id)
        except RuntimeError:
            logger.debug("request %s: dropped after its event loop had ended", request_id)

    def _abandon_here(self, request_id: str) -> None:
        if request_id in self._inboxes and self.health().ok:
            logger.debug("abort %s", request_id)
            self._supervisor.send(Abort([request_id]))

    # Calls

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False: some blocks are in use, and nothing was forgotten."""
        return await self._call("reset_prefix_cache")

    async def update_weights(self, tensors: object) -> int:
        """Not here: ``LLM`` takes new weights.

        Raises:
            ConfigError: always. An engine process that is restarted comes back with the weights of its files, so that
                requests would be answered by the old model unnoticed.
        """
        raise ConfigError(
            "weights are updated in the engine of the calling process (LLM.update_weights): one in a process of its own would "
            "come back with the weights of its files when it is restarted",
            "tensors",
        )

    async def check_integrity(self) -> None:
        """Raises: EngineError: the block pool's books do not add up."""
        await self._call("check_integrity")

    async def _call(self, name: ControlName) -> bool:
        self._supervisor.check()
        self._num_calls += 1
        call = self._num_calls
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[call] = (name, reply)
        try:
            self._supervisor.send(Control(call, name))
            return await reply
        finally:
            self._calls.pop(call, None)

    # What the supervisor calls

    def on_message(self, message: FromEngine) -> None:
        match message:
            case Step(deltas, stats):
                self.stats = stats
                for delta in deltas:
                    self._deliver(delta)
            case Ready(_, stats):
                self.stats = stats
            case Accepted(request_id):
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.accept()
            case Rejected(request_id, kind, text, param):
                if (inbox := self._inboxes.pop(request_id, None)) is not None:
                    inbox.open.clear()
                    inbox.reject(QueueFullError(text, param) if kind == "queue_full" else RequestError(text, param))
            case ControlReply(call, value, error):
                _, reply = self._calls.get(call, (None, None))
                if reply is None or reply.done():
                    return
                if error is None:
                    reply.set_result(value)
                else:
                    reply.set_exception(EngineError(error))

    def on_lost(self, reason: str) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.lost(reason)
        for _, reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(reason))
        self.stats = EngineStats()

    def pending(self) -> list[str]:
        return [*self._inboxes, *(name for name, _ in self._calls.values())]

    def _deliver(self, delta: OutputDelta) -> None:
        inbox = self._inboxes.get(delta.request_id)
        if inbox is None:
            return
        inbox.put(delta)
        if not inbox.open:
            del self._inboxes[delta.request_id]
            if delta.finish_reason in ("stop", "length"):
                self._supervisor.served()


def _started(value: T | None) -> T:
    if value is None:
        raise EngineError("the engine has not been started")
    return value
