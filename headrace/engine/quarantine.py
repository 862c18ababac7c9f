"""Quarantine: refuses requests that were in flight at two deaths of the engine."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from headrace.core.request import Request
from headrace.errors import RequestError

DEATHS = 2
"""Deaths at which a request was in flight, after which it is refused."""
_MOST = 10_000
"""Requests that are remembered; the ones that were in flight the longest time ago are forgotten first."""

_encode = msgspec.msgpack.Encoder().encode


class _Suspect(msgspec.Struct):
    deaths: int
    since: float
    """When the engine died the last time."""


class Quarantine:
    """Remembers which requests were in flight when the engine died, for ``seconds``.

    A request is known by its prompt and parameters, so that sending it again does not make it another. One that is served
    is no suspect any more. Costs nothing while there is none.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: 0: nothing is refused."""
        self._seconds = seconds
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        """By fingerprint, in the order of ``since``."""

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, request: Request) -> None:
        """Raises: RequestError: the request is in quarantine."""
        self._forget()
        if self._suspects and (error := self._refusal(fingerprint(request))) is not None:
            raise error

    def died(self, requests: Iterable[Request]) -> dict[str, RequestError]:
        """The engine died with these requests in flight. Returns, by request id, why some are refused from now on."""
        if not self._seconds:
            return {}
        prints = {request.request_id: fingerprint(request) for request in requests}
        for key in set(prints.values()):
            suspect = self._suspects.setdefault(key, _Suspect(0, 0.0))
            suspect.deaths += 1
            suspect.since = self._clock()
            self._suspects.move_to_end(key)
        self._forget()
        refusals = {request_id: self._refusal(key) for request_id, key in prints.items()}
        return {request_id: error for request_id, error in refusals.items() if error is not None}

    def served(self, request: Request) -> None:
        """The request came to its end."""
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget(self) -> None:
        end = self._clock() - self._seconds
        while self._suspects and (len(self._suspects) > _MOST or next(iter(self._suspects.values())).since <= end):
            self._suspects.popitem(last=False)

    def _refusal(self, key: bytes) -> RequestError | None:
        suspect = self._suspects.get(key)
        if suspect is None or suspect.deaths < DEATHS:
            return None
        left = suspect.since + self._seconds - self._clock()
        message = (
            f"this request was in flight when the engine died, {suspect.deaths} times; it is refused for {left:.0f} s more"
        )
        return RequestError(message, code="quarantined")


def fingerprint(request: Request) -> bytes:
    """Of the prompt and the parameters. The seed is left out: whatever kills an engine does not depend on it."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    items = [item.content_hash for item in request.items]
    return hashlib.blake2b(_encode((request.prompt_token_ids, sampling, request.max_tokens, items)), digest_size=16).digest()
