"""OutputStream: the deltas of one request, from the engine's messages to whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from headrace.core.request import Request
from headrace.errors import EngineDeadError, RequestError
from headrace.outputs import CompletionOutput, OutputDelta, RequestOutput


class Inbox:
    """Where a request's deltas arrive. What is not read yet is bounded by the length of the request's outputs."""

    def __init__(self, request_id: str, samples: int) -> None:
        self.request_id = request_id
        self.deltas: deque[OutputDelta] = deque()
        self.open = set(range(samples))
        """Samples that have not finished."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Future[None] | None = None

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def reject(self, error: RequestError | EngineDeadError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            # Whoever added the request may have left meanwhile; then nobody is to complain of an unread error.
            self.accepted.exception()

    def put(self, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self.open.discard(delta.index)
        self.deltas.append(delta)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def lost(self, reason: str) -> None:
        """The engine is gone: whoever waits is answered."""
        self.reject(EngineDeadError(reason))
        for index in sorted(self.open):
            self.put(OutputDelta(request_id=self.request_id, index=index, finish_reason="error", error=reason))

    async def get(self) -> OutputDelta | None:
        """The next delta; None after the last one. One reader at a time."""
        while not self.deltas:
            if not self.open:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.deltas.popleft()


class OutputStream:
    """Async iterator over the deltas of all samples of a request, in the order they came.

    When the engine dies, every sample that had not finished gets a delta with ``finish_reason="error"``. A reader who
    leaves early should ``aclose()`` (or use ``async with``), which aborts the request; dropping the stream does too.
    """

    def __init__(self, inbox: Inbox, abort: Callable[[str], None]) -> None:
        self._inbox = inbox
        self._abort = abort
        self._left = False

    @property
    def request_id(self) -> str:
        return self._inbox.request_id

    @property
    def finished(self) -> bool:
        """No more deltas will come; some may still wait to be read."""
        return not self._inbox.open

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        delta = await self._inbox.get()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Aborts what still runs. Once is enough; more does no harm."""
        self._leave()

    def _leave(self) -> None:
        if self._inbox.open and not self._left:
            self._left = True
            self._abort(self._inbox.request_id)

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()


def new_output(request: Request) -> RequestOutput:
    """The output of a request of which nothing is known yet."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index=index) for index in range(request.sampling.n)],
    )
