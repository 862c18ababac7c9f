"""ReplicaBook: which replica of a cluster gets an HTTP request. Without Ray, and without a clock."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from headrace.choices import RoutingPolicy
from headrace.core.request import Request
from headrace.deploy.call import HttpCall
from headrace.routing import STRIDE, Capacity, Loads, RoutedPrefixes, make_policy, prefix_keys
from headrace.routing.policies import RoutedRequest
from headrace.sampling_params import MAX_SAMPLES, SamplingParams

Name = TypeVar("Name", bound=Hashable)

_BEFORE = ("tools", "system", "instructions")
_CONTENT = ("prompt", "messages", "input")
"""Fields of a body that hold the prompt; chat templates put those of ``_BEFORE`` before it."""
_TOKEN_BYTES = 4
"""Bytes of text that count as a token."""


class _Sent(NamedTuple):
    slot: int
    rows: int
    prefill: int
    keys: Sequence[bytes]


class ReplicaBook(Generic[Name]):
    """A routing policy over replicas that come and go.

    It knows the text of a request, not its tokens, and loads are those of the requests that were sent through it. A replica
    reports ``ready`` and ``kv_tokens``; its cache is taken to have what was sent there last, as much as it holds.
    """

    def __init__(self, policy: RoutingPolicy, max_replicas: int) -> None:
        """Replicas beyond ``max_replicas`` get nothing."""
        self._policy = make_policy(policy, max_replicas)
        self._loads, self._index = Loads(max_replicas), RoutedPrefixes(max_replicas)
        self._slots: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._sent: dict[str, _Sent] = {}

    def update(self, replicas: Mapping[Name, Mapping[str, Any]]) -> None:
        """These are there, with their reports, which are empty at first."""
        for gone in [name for name in self._slots if name not in replicas]:
            slot = self._slots.pop(gone)
            del self._names[slot]
            self._loads.stop(slot)
            self._index.start(slot)
        free = [slot for slot in range(len(self._loads)) if slot not in self._names]
        for name, report in replicas.items():
            if name not in self._slots and free:
                self._slots[name] = slot = free.pop(0)
                self._names[slot] = name
                self._index.start(slot, 0)
            if name in self._slots:
                self._note(self._slots[name], report)

    def _note(self, slot: int, report: Mapping[str, Any]) -> None:
        ready = report.get("ready", True)
        if ready and not self._loads.up[slot]:
            self._loads.start(slot, Capacity(0, 0, 0))
        elif not ready and self._loads.up[slot]:
            self._loads.stop(slot)
        self._index.resize(slot, report.get("kv_tokens", 0))

    def choose(self, name: str, call: HttpCall, now: float) -> Name | None:
        """The replica for a request that is sent there now. None: none is ready.

        A request that was chosen for before was not taken there.
        """
        self.end(name, computed=False)
        if not self._loads.num_up:
            return None
        request = routed_request(name, call)
        keys = prefix_keys(request, STRIDE)
        hits = [(slot, count * STRIDE) for slot, count in self._index.hits(keys)]
        routed = RoutedRequest(len(request.prompt_token_ids), request.sampling.n, hits, request.session)
        slot = self._policy.choose(routed, self._loads, now).replica
        self._index.add(slot, keys)
        prefill = routed.new_tokens(self._index.send(slot, keys) * STRIDE)
        self._loads.queue(slot, routed.rows, prefill)
        self._loads.send(slot, routed.rows, prefill)
        self._sent[name] = _Sent(slot, routed.rows, prefill, keys)
        return self._names[slot]

    def end(self, name: str, *, computed: bool = True) -> None:
        """A request has ended, its prompt computed or not. Unknown ones are ignored."""
        sent = self._sent.pop(name, None)
        if sent is not None:
            self._loads.remove(sent.slot, sent.rows, sent.prefill, sent.prefill)
            self._index.remove(sent.slot, sent.keys, sent=True, computed=computed)


def routed_request(name: str, call: HttpCall) -> Request:
    """Returns the properties of an HTTP request that routing looks at. The replica checks whether the request is valid."""
    is_json = "json" in (call.header("content-type") or "")
    try:
        body = msgspec.json.decode(call.body) if is_json else {}
    except (msgspec.DecodeError, RecursionError):
        body = {}
    body = body if isinstance(body, dict) else {}
    content = next((body[field] for field in _CONTENT if field in body), "")
    if isinstance(content, list) and content and all(type(token) is int and 0 <= token < 2**31 for token in content):
        tokens = content
    else:
        data = b"".join(msgspec.json.encode(body[field]) for field in _BEFORE if body.get(field))
        data += content.encode() if isinstance(content, str) else msgspec.json.encode(content)
        tokens = array("I", data + bytes(-len(data) % _TOKEN_BYTES)).tolist()
    salt, samples, user = body.get("cache_salt"), body.get("n"), body.get("user")
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=SamplingParams(n=samples if type(samples) is int and 1 <= samples <= MAX_SAMPLES else 1),
        max_tokens=1,
        seed=0,
        cache_salt=salt if isinstance(salt, str) else None,
        session=call.header("x-session-id") or (user if isinstance(user, str) else None) or None,
    )
