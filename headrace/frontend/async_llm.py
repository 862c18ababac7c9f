"""AsyncLLM: client of an engine in its own process, for servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    HeadraceError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from headrace.frontend.adapters import LoRARequest, NamedAdapter, RemoteAdapters
from headrace.frontend.inputs import InputProcessor, Prompt
from headrace.frontend.pooled_calls import AsyncPooledCalls, Make
from headrace.frontend.pooling import PoolingInputs
from headrace.frontend.prepare import described, input_processor
from headrace.frontend.streams import Inbox, OutputStream, new_output
from headrace.frontend.weights import Weights
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta, PoolingRequestOutput, RequestOutput
from headrace.outputs import T as Result
from headrace.processes.messages import (
    Abort,
    Accepted,
    AddRequest,
    Control,
    ControlName,
    ControlReply,
    FromEngine,
    Ready,
    Rejected,
    Stats,
    StepDeltas,
    WeightReply,
)
from headrace.processes.quarantine import Quarantine
from headrace.processes.replicas import ReplicaSet
from headrace.processes.spawn import COMMAND, Spawned
from headrace.processes.supervisor import EngineSupervisor, Health
from headrace.sampling_params import SamplingParams
from headrace.startup.text import ModelText, load_text

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.engine")

T = TypeVar("T")


class AsyncLLM(AsyncPooledCalls):
    """Client of one engine process, or of ``data_parallel_size`` replicas, which it starts, watches and restarts. Belongs to
    the event loop that started it.

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
        spawned: Spawned | None = None,
    ) -> None:
        """``chat_template``: a template, or the path of one, in place of the tokenizer's. ``spawned``: the process for the
        first start, started before; None: ``start`` starts it."""
        self.args = args or EngineArgs()
        self._chat_template = chat_template
        self._stats = EngineStats()
        single = self.args.data_parallel_size == 1
        make: type[EngineSupervisor] | type[ReplicaSet] = EngineSupervisor if single else ReplicaSet
        self._quarantine = Quarantine(self.args.quarantine_seconds)
        self._supervisor = make(
            self.args, self, on_progress=on_progress, command=self.command, quarantine=self._quarantine, spawned=spawned
        )
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, tuple[ControlName, asyncio.Future[bool]]] = {}
        packed_bytes = self.args.weight_transfer_config.packed_buffer_size_bytes
        self.weights = Weights(self._supervisor, self.abort_all, packed_bytes)
        self._num_calls = 0
        self._draining = False
        self.adapters = RemoteAdapters(self.args, self._ask, self._tell, self._open_requests)
        """Adapters that requests may name."""
        self._info: EngineInfo | None = None
        self._text: ModelText | None = None
        self._inputs: InputProcessor | None = None
        self._pooling: PoolingInputs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    # Life

    async def start(self) -> None:
        """Waits until the engine has run its first step.

        Raises:
            ConfigError: the arguments cannot work with this model on this machine.
            EngineError: the engine did not start.
        """
        self._check_owner()
        self._loop = asyncio.get_running_loop()
        try:
            # Both read the model's files, each for its own process.
            loading = asyncio.to_thread(load_text, self.args, self._chat_template, prepared=True)
            text, info = await asyncio.gather(loading, self._supervisor.start())
            self._inputs = input_processor(
                text, self.args, vocab_size=info.vocab_size, max_model_len=info.max_model_len, media=info.media
            )
            self._pooling = PoolingInputs(self._inputs, text.pooling)
            await asyncio.to_thread(self._inputs.prepare)
            self._text = text
            if self._inputs.answers is not None:
                # Rendered here, not in the first request's time.
                await asyncio.to_thread(getattr, self._inputs.answers, "header")
            # The client's tokenizer may have another chat template than the engine's.
            self._info = described(info, self._inputs)
        except BaseException:
            await self.close()
            raise

    def serving(self) -> None:
        """Ends the start-up timeline; called when the server accepts requests."""
        self._info = self.info.followed_by("server", self._supervisor.origin, "until it took requests")

    async def close(self) -> None:
        """Ends the engine; requests in flight end with an error."""
        self._check_owner()
        await self._supervisor.close()
        self.adapters.names.close()
        if self._inputs is not None:
            await asyncio.to_thread(self._inputs.close)
        if self._text is not None and self._text.tokenizer is not None:
            self._text.tokenizer.renderer.close()

    async def drain(self) -> None:
        """Refuses new requests, and waits until those in flight have ended.

        Raises: EngineDeadError: the engine died meanwhile; its requests have ended with errors.
        """
        self._check_owner()
        self._draining = True
        await self._call("drain")

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def health(self) -> Health:
        """Good while requests are served, or queued; else says why they are not."""
        health, weights = self._supervisor.health(), self._supervisor.weights
        return Health(False, weights.reason) if health.ok and weights.reason else health

    @property
    def failed(self) -> bool:
        """The engine stays down: it did not start, died repeatedly, or was closed."""
        return self.health().final

    # Facts

    @property
    def info(self) -> EngineInfo:
        return _started(self._info)

    @property
    def inputs(self) -> InputProcessor:
        return _started(self._inputs)

    @property
    def pooling(self) -> PoolingInputs:
        return _started(self._pooling)

    @property
    def text(self) -> ModelText:
        return _started(self._text)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with ``skip_tokenizer_init``."""
        return self.text.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, at most ``STATS_SECONDS`` old, and exact while the engine is idle. Counters restart at 0 with
        the engine; those of several replicas are sums, which do not."""
        return self._stats if isinstance(self._supervisor, EngineSupervisor) else self._supervisor.stats

    @property
    def replicas(self) -> ReplicaSet | None:
        """None: there is one engine."""
        return self._supervisor if isinstance(self._supervisor, ReplicaSet) else None

    @property
    def engine_pid(self) -> int | None:
        """Process id of the running engine."""
        return self._supervisor.pid

    # Requests

    async def add(self, *requests: Request) -> OutputStream:
        """Hand requests to the engine, and return once they are in its queue. One stream carries the deltas of all.

        Raises:
            RequestError: the engine refuses one, a request with this id is running, or one has crashed the engine; then none
                runs.
            QueueFullError: too many requests are waiting.
            EngineDeadError: the engine is not running, or died before it took the requests.
            EngineError: this is not the process or the event loop that started the engine, or taking a request in failed.
        """
        self._check_owner()
        self._supervisor.check()
        if self._draining:
            raise EngineDeadError("the engine is draining and takes no more requests")
        for request in requests:
            if request.request_id in self._inboxes:
                raise RequestError(f"a request with the id {request.request_id!r} is running", "request_id")
            if (refusal := self._quarantine.refusal(request)) is not None:
                raise refusal
        requests = tuple(map(self.adapters.names.current, requests))
        inbox = Inbox(requests)
        self._inboxes |= dict.fromkeys(inbox.open, inbox)
        stream = OutputStream(inbox, self._abandon)
        try:
            for request in requests:
                self._supervisor.send(AddRequest(request))
            await inbox.accepted
        except BaseException:
            # Refused in part or cancelled: the engine may have taken some.
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
        lora_request: LoRARequest | None = None,
        default_max_tokens: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The request's output as it grows: one object, yielded after each delta. Leaving early aborts the request.

        Args:
            lora_request: the adapter, which is loaded if it is not; None: the base model.
            default_max_tokens: limit of an output whose parameters have none; None: the rest of the context.

        Raises: as ``add`` and ``load_lora``. An engine that dies later shows in ``output.error`` and in finish_reason "error".
        """
        self._check_owner()
        adapter = None if lora_request is None else (await self.load_lora(lora_request)).ref
        request = await self.inputs.request_async(
            prompt,
            params if params is not None else self.inputs.default_sampling,
            request_id=request_id if request_id is not None else f"generate-{uuid.uuid4().hex}",
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            default_max_tokens=default_max_tokens,
        )
        output = new_output(request)
        text = self.tokenizer.token_text if self.tokenizer is not None else None
        async with await self.add(request) as stream:
            async for delta in stream:
                output.add(delta, text)
                yield output

    async def _pool(self, make: Make[Result], lora_request: LoRARequest | None) -> list[PoolingRequestOutput[Result]]:
        self._check_owner()
        names = f"pool-{uuid.uuid4().hex}"
        adapter = None if lora_request is None else (await self.load_lora(lora_request)).ref
        batch = await self.inputs.in_thread("", lambda: make(self.pooling, names, adapter))
        outputs = {request.request_id: new_output(request) for request in batch.requests}
        if batch.requests:
            async with await self.add(*batch.requests) as stream:
                async for delta in stream:
                    outputs[delta.request_id].add(delta)
        return batch.finish(list(outputs.values()))

    async def abort(self, request_id: str) -> None:
        """End a request within a step; its stream gets deltas with finish_reason "abort". Unknown ids are ignored."""
        self._check_owner()
        self._abandon_here([request_id])

    def abort_all(self) -> None:
        """Ends all requests, those included that no engine has yet."""
        self._abandon_here(list(self._inboxes))

    def _abandon(self, request_ids: list[str]) -> None:
        """Abort from any thread: the garbage collector may drop a stream in another one."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abandon_here, request_ids)
        except RuntimeError:
            logger.debug("%s: dropped after the event loop had ended", request_ids)

    def _abandon_here(self, request_ids: list[str]) -> None:
        running = [request_id for request_id in request_ids if request_id in self._inboxes]
        if running and self._supervisor.health().ok:
            logger.debug("abort %s", running)
            for request_id in running:
                self._inboxes[request_id].bound.add(request_id)
            self._supervisor.send(Abort(running))

    # Adapters

    async def load_lora(self, request: LoRARequest, *, new: bool = False) -> NamedAdapter:
        """Loads an adapter into every engine, unless it is loaded. Requests that run keep the adapter that they began with.

        Args:
            new: the name must not be in use.

        Raises:
            ConfigError: the engine takes no adapters, or this is none that it can serve.
            ConflictError: too many adapters are loaded, or the name is another's.
            EngineDeadError: the engine is not running.
        """
        self._check_owner()
        return await self.adapters.load(request, new=new)

    async def unload_lora(self, name: str, lora_int_id: int | None = None) -> None:
        """Forgets an adapter's name. Requests that run with it go on.

        Raises:
            UnknownModelError: there is no such adapter.
            ConflictError: it was loaded with another number.
        """
        self._check_owner()
        await self.adapters.unload(name, lora_int_id)

    def _tell(self, message: Control) -> None:
        """Sends a control message whose answer is not awaited. An engine that does not run has nothing to do."""
        with contextlib.suppress(EngineDeadError):
            self._supervisor.send(message)

    def _open_requests(self) -> Iterator[Request]:
        yield from (inbox.requests[request_id] for request_id, inbox in self._inboxes.items())

    # Calls

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False: prefix caching is disabled."""
        return await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        """Raises: EngineError: the block pool is inconsistent."""
        await self._call("check_integrity")

    def _check_owner(self) -> None:
        """Raises: EngineError: the engine's socket is read by another event loop, or by another process."""
        if os.getpid() != self._pid:
            raise EngineError(f"this AsyncLLM belongs to process {self._pid}: make another one after a fork")
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise EngineError("this AsyncLLM belongs to the event loop that started it, and this is another one")

    async def _call(self, name: ControlName) -> bool:
        return await self._ask(Control(0, name))

    async def _ask(self, message: Control) -> bool:
        """Sends a control message, numbered, and waits for the answer."""
        self._check_owner()
        self._supervisor.check()
        self._num_calls += 1
        call = self._num_calls
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[call] = (message.name, reply)
        try:
            self._supervisor.send(Control(call, message.name, message.adapter))
            return await reply
        finally:
            self._calls.pop(call, None)

    # What the supervisor calls

    def on_message(self, message: FromEngine) -> None:
        match message:
            case StepDeltas(deltas):
                for delta in deltas:
                    self._deliver(delta)
            case Ready(_, stats):
                self._stats = stats
                self.adapters.engine_started()
            case Stats(stats):
                self._stats = stats
            case Accepted(request_id):
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.accept(request_id)
            case Rejected(request_id, kind, text, param):
                if (inbox := self._inboxes.pop(request_id, None)) is not None:
                    # A replica may refuse what another one had accepted: its reader must see the end.
                    inbox.lost(request_id, _rejection(kind, text, param))
            case WeightReply():
                self.weights.answered(message)
            case ControlReply(call, value, error, param):
                _, reply = self._calls.get(call, (None, None))
                if reply is None or reply.done():
                    return
                if error is None:
                    reply.set_result(value)
                else:
                    reply.set_exception(EngineError(error) if param is None else ConfigError(error, param))

    def on_lost(self, reason: str, *, died: bool, request_ids: Collection[str] | None = None) -> None:
        lost = {name: self._inboxes[name] for name in (request_ids or ()) if name in self._inboxes}
        if request_ids is None:
            lost = self._inboxes.copy()
        for request_id, inbox in lost.items():
            refusal = self._quarantine.refusal(inbox.requests[request_id]) if died else None
            if died and request_ids is not None and refusal is None and self._run_again(request_id, inbox):
                continue
            if refusal is not None:
                logger.error("request %s is refused for %g s", request_id, self.args.quarantine_seconds)
            error = EngineDeadError(reason) if refusal is None else RequestError(f"{reason}; {refusal}", code=refusal.code)
            del self._inboxes[request_id]
            inbox.lost(request_id, error)
        if request_ids is not None:
            return
        for _, reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(reason))
        self.weights.lost(reason)
        self._stats = EngineStats()

    def _run_again(self, request_id: str, inbox: Inbox) -> bool:
        """Sends a request that was lost with its replica to another one. False: it cannot run again, or no replica runs."""
        if request_id in inbox.bound:
            return False
        try:
            self._supervisor.send(AddRequest(inbox.requests[request_id]))
        except EngineDeadError:
            return False
        return True

    def pending(self) -> list[str]:
        return [*self._inboxes, *(name for name, _ in self._calls.values()), *self.weights.pending()]

    def _deliver(self, delta: OutputDelta) -> None:
        inbox = self._inboxes.get(delta.request_id)
        if inbox is None:
            return
        inbox.put(delta)
        if delta.request_id not in inbox.open:
            del self._inboxes[delta.request_id]
            self.adapters.collect()


def _rejection(kind: str, text: str, param: str | None) -> HeadraceError:
    if kind == "engine":
        return EngineError(text)
    if kind == "unavailable":
        return UnavailableError(text)
    return (QueueFullError if kind == "queue_full" else RequestError)(text, param)


def _started(value: T | None) -> T:
    if value is None:
        raise EngineError("the engine has not been started")
    return value
