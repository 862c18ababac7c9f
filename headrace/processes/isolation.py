"""Isolation: the requests that one engine has, and suspects, which it runs one at a time with no others."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.core.request import Request
from headrace.processes.quarantine import Quarantine

ALONE_SECONDS = 10.0
"""Most time for which a suspect waits for the engine to be empty, and then again has it alone, for each of its crashes."""
_MOST_CRASHES = 8


class CallLater(Protocol):
    def __call__(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...


@dataclasses.dataclass(slots=True)
class _Turn:
    """One suspect's time alone with the engine."""

    request_id: str
    seconds: float
    began: float
    timer: asyncio.TimerHandle


class Isolation:
    """Decides when one engine is sent a request.

    Requests are sent at once while there is no suspect. Each suspect has one turn: nothing else is sent until the engine is
    empty, then the suspect, then nothing until it has ended. Both waits are bounded, by ``ALONE_SECONDS`` for each crash; a
    suspect whose time is over goes on beside the others. If requests had to wait for a turn, the next one begins only after
    as much time as it took.
    """

    def __init__(
        self,
        quarantine: Quarantine,
        send: Callable[[Request], None],
        on_turn: Callable[[bool], None] = lambda begins: None,
        *,
        call_later: CallLater | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_turn``: called where a turn begins, and where none follows. ``call_later``: None: of the running loop."""
        self._quarantine = quarantine
        self._send_now = send
        self._on_turn = on_turn
        self._call_later = call_later
        self._clock = clock
        self._sent: dict[str, Request] = {}
        self._samples: dict[str, int] = {}
        """Request that was sent -> samples that have not ended."""
        self._suspects: dict[str, Request] = {}
        """Await their turn, in order."""
        self._held: dict[str, Request] = {}
        """Others, which wait for the end of the turn."""
        self._turn: _Turn | None = None
        self._pause: asyncio.TimerHandle | None = None
        """The end of the time between two turns."""

    @property
    def sent(self) -> list[Request]:
        """Requests that the engine has."""
        return list(self._sent.values())

    def add(self, request: Request) -> None:
        if self._quarantine.crashes(request):
            self._suspects[request.request_id] = request
            self._advance()
        elif self._turn is not None:
            self._held[request.request_id] = request
        else:
            self._send(request)

    def sample_ended(self, request_id: str) -> Request | None:
        """One sample ended. Returns the request if it was its last."""
        if request_id not in self._samples:
            return None
        self._samples[request_id] -= 1
        return None if self._samples[request_id] else self.ended(request_id)

    def ended(self, request_id: str) -> Request | None:
        """The engine has done with the request, or refused it. None: it did not have it."""
        self._samples.pop(request_id, None)
        request = self._sent.pop(request_id, None)
        if self._turn is not None and self._turn.request_id == request_id:
            self._end_turn()
        elif self._suspects:
            self._advance()
        return request

    def remove(self, request_ids: Iterable[str]) -> list[Request]:
        """Takes out those of the requests that were not sent yet."""
        removed = []
        for request_id in request_ids:
            request = self._held.pop(request_id, None) or self._suspects.pop(request_id, None)
            if request is not None:
                removed.append(request)
                if self._turn is not None and self._turn.request_id == request_id:
                    self._end_turn()
        return removed

    def release(self) -> None:
        """Sends all that waits: the engine is to be emptied, and takes no more."""
        waiting = [*self._suspects.values(), *self._held.values()]
        self._stop()
        self._on_turn(False)
        for request in waiting:
            self._send(request)

    def clear(self) -> None:
        """The engine is gone, or is about to be."""
        self._stop()
        self._sent.clear()
        self._samples.clear()

    def _stop(self) -> None:
        self._suspects.clear()
        self._held.clear()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._turn is not None:
            self._turn.timer.cancel()
            self._turn = None

    def _send(self, request: Request) -> None:
        self._sent[request.request_id] = request
        self._samples[request.request_id] = request.sampling.n
        self._send_now(request)

    def _timer(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return (self._call_later or asyncio.get_running_loop().call_later)(seconds, callback)

    def _advance(self) -> None:
        """Begins the next turn if it is time, and sends the suspect whose turn it is if the engine is empty."""
        if self._turn is None:
            if not self._suspects or self._pause is not None:
                return
            request = next(iter(self._suspects.values()))
            seconds = ALONE_SECONDS * min(self._quarantine.crashes(request), _MOST_CRASHES)
            self._turn = _Turn(request.request_id, seconds, self._clock(), self._timer(seconds, self._end_turn))
            self._on_turn(True)
        turn = self._turn
        if turn.request_id in self._suspects and not self._sent:
            turn.timer.cancel()
            turn.timer = self._timer(turn.seconds, self._end_turn)
            self._send(self._suspects.pop(turn.request_id))

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        turn.timer.cancel()
        held, self._held = self._held, {}
        late = self._suspects.pop(turn.request_id, None)
        for request in ([] if late is None else [late]) + list(held.values()):
            self._send(request)
        if held:
            self._pause = self._timer(self._clock() - turn.began, self._end_pause)
        self._advance()
        if self._turn is None:
            self._on_turn(False)

    def _end_pause(self) -> None:
        self._pause = None
        self._advance()
