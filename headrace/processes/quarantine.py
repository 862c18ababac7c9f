"""Quarantine: the requests that may have crashed the engine, and those that have."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

import msgspec

from headrace.core.request import Request
from headrace.errors import RequestError

_MOST = 10_000
"""Requests that are remembered. For another one, the tenant that has the most of them gives up the one that was in flight the
longest time ago."""

_encode = msgspec.msgpack.Encoder().encode


class _Suspect(msgspec.Struct):
    tenant: str
    crashes: int = 0
    """Crashes at which it was in flight."""
    since: float = 0.0
    """Time of the last crash of the engine."""
    guilty: bool = False
    """The engine crashed again, and nothing else was in flight."""


class Quarantine:
    """Remembers for ``seconds`` which requests were in flight when an engine crashed.

    They are suspects, which engines run alone (``Isolation``). A suspect is refused once an engine has crashed with nothing
    else in flight. A request is known by its prompt and parameters, so that sending it again does not make it another. One
    that is served is not a suspect any more. Costs nothing while there is none.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: 0: nothing is suspected."""
        self._seconds = seconds
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        """Suspects by fingerprint, in the order of ``since``."""

    def __len__(self) -> int:
        return len(self._suspects)

    def crashes(self, request: Request) -> int:
        """Crashes at which the request was in flight; 0: it is not a suspect."""
        suspect = self._find(request)
        return 0 if suspect is None else suspect.crashes

    def refusal(self, request: Request) -> RequestError | None:
        """Returns why the request is refused; None: it is not."""
        suspect = self._find(request)
        if suspect is None or not suspect.guilty:
            return None
        left = suspect.since + self._seconds - self._clock()
        message = (
            f"the engine crashed {suspect.crashes} times with this request in flight, the last time with this request alone; "
            f"it is refused for {left:.0f} s more"
        )
        return RequestError(message, code="quarantined")

    def crashed(self, requests: Collection[Request]) -> None:
        """An engine crashed with these requests in flight. Deaths that came from outside are not reported here."""
        prints = {fingerprint(request): request.tenant for request in requests} if self._seconds else {}
        for key, tenant in prints.items():
            suspect = self._suspects.setdefault(key, _Suspect(tenant))
            suspect.guilty |= len(prints) == 1 and suspect.crashes > 0
            suspect.crashes += 1
            suspect.since = self._clock()
            self._suspects.move_to_end(key)
        counts = Counter(suspect.tenant for suspect in self._suspects.values())
        while counts.total() > _MOST:
            largest = max(counts, key=counts.__getitem__)
            counts[largest] -= 1
            del self._suspects[next(key for key, suspect in self._suspects.items() if suspect.tenant == largest)]

    def served(self, request: Request) -> None:
        """The request came to its end."""
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _find(self, request: Request) -> _Suspect | None:
        end = self._clock() - self._seconds
        while self._suspects and next(iter(self._suspects.values())).since <= end:
            self._suspects.popitem(last=False)
        return self._suspects.get(fingerprint(request)) if self._suspects else None


def fingerprint(request: Request) -> bytes:
    """Returns the hash of the prompt, the parameters and the constraint.

    The seed is left out: whatever kills an engine does not depend on it.
    """
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    items = [item.content_hash for item in request.items]
    grammar = None if request.constraint is None else request.constraint.grammar
    facts = request.prompt_token_ids, sampling, request.max_tokens, items, grammar
    return hashlib.blake2b(_encode(facts), digest_size=16).digest()
