"""OutputStream: the deltas of one or more requests, from the engine's messages to the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from headrace.core.request import Request
from headrace.engine.endings import failed
from headrace.errors import HeadraceError
from headrace.outputs import CompletionOutput, OutputDelta, RequestOutput, merged

_MOST_MERGED = 32
"""Deltas that a reader gets as one."""


class Inbox:
    """The queue between the task that receives the engine's messages and the task that answers a client.

    Several requests may share one. The number of unread deltas is bounded by the length of the requests' outputs.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.deltas: deque[OutputDelta] = deque()
        self.open = {request.request_id: set(range(request.sampling.n)) for request in requests}
        """request id -> samples that have not finished; a request without any is not there."""
        self._loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        """Done when the engine has taken all requests, or refused one."""
        self._unanswered = set(self.requests)
        self.bound: set[str] = set()
        """Requests that no other replica can run again: their reader has seen a part, or has left."""
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[], bool] | None = None
        """Takes messages in place of the waiting reader."""
        self._scheduled = False
        """``_call`` is about to run."""

    def accept(self, request_id: str) -> None:
        self._unanswered.discard(request_id)
        if not self._unanswered and not self.accepted.done():
            self.accepted.set_result(None)

    def reject(self, request_id: str, error: HeadraceError) -> None:
        self.open.pop(request_id, None)
        if not self.accepted.done():
            self.accepted.set_exception(error)
            # The task that added the request may be gone: asyncio must not log an unread error then.
            self.accepted.exception()

    def put(self, delta: OutputDelta) -> None:
        self.bound.add(delta.request_id)
        if delta.finish_reason is not None and (samples := self.open.get(delta.request_id)) is not None:
            samples.discard(delta.index)
            if not samples:
                del self.open[delta.request_id]
        self.deltas.append(delta)
        if self._take is not None:
            self._schedule()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def lost(self, request_id: str, error: HeadraceError) -> None:
        """The engine is gone: every sample of the request that is not finished ends with an error."""
        for delta in failed(self.requests[request_id], error):
            if delta.index in self.open.get(request_id, ()):
                self.put(delta)
        self.reject(request_id, error)

    async def more(self) -> bool:
        """Waits for a delta. False: there are no more. One reader at a time."""
        while not self.deltas:
            if not self.open:
                return False
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return True

    async def each(self, take: Callable[[], bool]) -> None:
        """Calls ``take`` when deltas have come, until it returns False or has taken the last ones. One reader at a time."""
        self._reader, self._take = self._loop.create_future(), take
        if self.deltas or not self.open:
            self._schedule()
        try:
            await self._reader
        finally:
            self._reader = self._take = None

    def _schedule(self) -> None:
        # Not at once: deltas of the messages that wait behind this one are taken together with it.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._scheduled = False
        if self._take is None or self._reader is None or self._reader.done():
            return
        try:
            more = self._take()
        except Exception as error:
            self._reader.set_exception(error)
            return
        if more and self.deltas:
            self._schedule()
        elif not more or not self.open:
            self._reader.set_result(None)


class OutputStream:
    """Async iterator over the deltas of all samples of its requests, in order of arrival.

    When the engine dies, every sample that is not finished gets a delta with ``finish_reason="error"``. A reader that leaves
    early must call ``aclose()`` or use ``async with``, which aborts the requests; dropping the stream does too.
    """

    def __init__(self, inbox: Inbox, abort: Callable[[list[str]], None]) -> None:
        self._inbox = inbox
        self._abort = abort
        self._left = False

    @property
    def finished(self) -> bool:
        """No more deltas will arrive; some may be unread."""
        return not self._inbox.open

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if not await self._inbox.more():
            raise StopAsyncIteration
        return self._inbox.deltas.popleft()

    def more(self) -> Awaitable[bool]:
        """Waits until a delta is ready. False: the last one has been read."""
        return self._inbox.more()

    def each(self, take: Callable[[], bool]) -> Awaitable[None]:
        """Calls ``take`` whenever deltas are ready, until it returns False or the last one is taken; raises what it raises.

        The task that waits here does not run in between, so a delta costs less than with ``more``."""
        return self._inbox.each(take)

    def ready(self) -> OutputDelta | None:
        """The next delta, if it has arrived, merged with those of the same sample that wait behind it: a reader that is behind
        has less to do for each token."""
        deltas = self._inbox.deltas
        if not deltas:
            return None
        run = [deltas.popleft()]
        while deltas and len(run) < _MOST_MERGED and deltas[0].continues(run[-1]):
            run.append(deltas.popleft())
        return merged(run)

    async def aclose(self) -> None:
        """Abort what still runs. May be called again."""
        self._leave()

    def _leave(self) -> None:
        if self._inbox.open and not self._left:
            self._left = True
            self._abort(list(self._inbox.open))

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()


def new_output(request: Request) -> RequestOutput:
    """The output of a request before its first delta."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index=index) for index in range(request.sampling.n)],
    )
