"""Reads a request's JSON body with strict limits."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from starlette.types import Scope

from headrace.errors import RequestError
from headrace.server.errors import ApiError, shown, unavailable
from headrace.server.settings import ServerSettings

T = TypeVar("T")

TENANT = "headrace.tenant"
"""Key of the scope: whose request it is, where the server has API keys."""
ADMIN = "headrace.admin"
"""Key of the scope: whether its key is an admin's, where the server has API keys."""
_BODY = "headrace.body"
"""Key of the scope: the request's body while its bytes count."""
_MAX_CONTENT_TYPE = 256
_CHARSET = re.compile(r'charset\s*=\s*"?([^\s;"]+)')
_SMALL_BODY = 64 * 2**10
"""Bytes that each request may hold beside the budget: large bodies that fill it must not keep small ones out."""


class Caller(NamedTuple):
    """Sender of a request; by default the line of a batch."""

    tenant: str = ""
    turn: str = ""
    """Name under which its work takes turns with that of others: the tenant's, or where there are no keys its address."""
    uploads: bool = False
    """Whether it may name uploaded features."""


def caller(request: Request) -> Caller:
    """Returns the sender of a request."""
    owner = str(request.scope.get(TENANT, ""))
    return Caller(owner, owner or (request.client.host if request.client is not None else ""), uploads=True)


class BodyBudget:
    """The bytes of request bodies that the server holds, over all connections, until the engine's requests are made of them or
    their clients are found to have left: bodies that wait for a thread take memory too. Each API key has an equal share."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._used: Counter[str] = Counter()
        """Bytes by tenant."""

    @property
    def used(self) -> int:
        return self._used.total()

    def json(self, request: Request, max_values: int | None) -> Body:
        """Returns the request's body, of JSON with at most ``max_values`` values (None: it is something else). Its bytes count
        until ``release_body``."""
        return self._body(request, self._settings.max_body_bytes, "max_body_bytes", max_values)

    def features(self, request: Request) -> Body:
        """Returns the body of features, counted like that of ``json``."""
        return self._body(request, self._settings.max_feature_bytes, "max_feature_bytes", None)

    def _body(self, request: Request, max_bytes: int, option: str, max_values: int | None) -> Body:
        body = request.scope[_BODY] = Body(self, request.scope.get(TENANT, ""), max_bytes, option, max_values)
        return body

    def charge(self, body: Body, size: int) -> None:
        """Raises: ApiError 503: other bodies of its tenant have spent the share."""
        most, used = self._settings.max_bytes_in_flight, self._used[body.tenant]
        if size > 0 and used > body.charged and used + size > (self._settings.share(most) if body.tenant else most):
            message = "too many large request bodies arrive at once (max_bytes_in_flight)"
            raise unavailable(message, self._settings.retry_after)
        self._used[body.tenant] += size
        body.charged += size


class Body:
    """The bytes of one body as they arrive."""

    def __init__(self, budget: BodyBudget, tenant: str, max_bytes: int, option: str, max_values: int | None) -> None:
        """``option``: that of ``max_bytes``. ``max_values``: of JSON; None: it is something else."""
        self.tenant = tenant
        self.data = bytearray()
        self.charged = 0
        self._num_values = 0
        self._budget, self._max_bytes, self._option, self._max_values = budget, max_bytes, option, max_values

    async def read(self, request: Request) -> None:
        """Raises: ApiError: 413 too large, at once by its Content-Length, or too many values; 503 no room for it."""
        length = request.headers.get("content-length", "")
        self._check_size(int(length) if length.isdigit() else 0)
        async for chunk in request.stream():
            size = len(self.data) + len(chunk)
            self._check_size(size)
            # Decoding holds the interpreter's lock, so no thread could do it for the event loop: it must be short.
            if self._max_values is not None:
                self._num_values += num_values(chunk)
                if self._num_values > self._max_values:
                    message = f"the body has more than {self._max_values} JSON values (max_json_values)"
                    raise ApiError(413, message, code="too_many_values")
            self._budget.charge(self, max(0, size - _SMALL_BODY) - self.charged)
            self.data += chunk

    def release(self) -> None:
        """Gives back what it has charged. May be called again."""
        self._budget.charge(self, -self.charged)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            message = f"the body is larger than {self._max_bytes} bytes ({self._option})"
            raise ApiError(413, message, code="body_too_large")


def release_body(scope: Scope) -> None:
    """Ends the account of the request's body, if there is one: when its content is in requests of the engine, and at the end
    of every request."""
    body: Body | None = scope.get(_BODY)
    if body is not None:
        body.release()


async def json_object(request: Request, settings: ServerSettings, budget: BodyBudget, max_values: int) -> dict[str, Any]:
    """The body as a dict. Fields that are null are left out: null means default everywhere in OpenAI's API.

    Args:
        max_values: JSON values that it may have.

    Raises:
        ApiError: 415 not JSON by its headers; 413 too large or too many values; 503 no room for it.
        RequestError: not UTF-8, not JSON (NaN and numbers out of range among it), nested too deeply, or not an object.
    """
    check_content_type(request)
    body = budget.json(request, max_values)
    await body.read(request)
    value = decoded(body.data, Any)
    body.data.clear()
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return {name: item for name, item in value.items() if item is not None}


def check_content_encoding(request: Request) -> None:
    """Raises: ApiError 415: the body is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding {shown(encoding)!r} is not supported: send the body as it is"
        raise ApiError(415, message, param="Content-Encoding")


def check_content_type(request: Request) -> None:
    """Raises: ApiError 415: the body is compressed, or not JSON by its headers."""
    check_content_encoding(request)
    given = request.headers.get("content-type", "")
    if len(given) > _MAX_CONTENT_TYPE:
        raise ApiError(415, f"Content-Type is longer than {_MAX_CONTENT_TYPE} characters", param="Content-Type")
    kind, _, parameters = given.lower().partition(";")
    kind = kind.strip()
    # Without this header, or as text/plain, a web page of any origin could post without a preflight.
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"Content-Type must be application/json, not {shown(kind)!r}", param="Content-Type")
    charset = _CHARSET.search(parameters)
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"JSON is sent as UTF-8, not {shown(charset[1])!r}", param="Content-Type")


def num_values(data: bytes) -> int:
    """Estimate the number of values in JSON text from its punctuation.

    A string, a list or an object counts as four numbers or more, because it takes that much longer to decode. Quotes that are
    escaped within texts do not count.
    """
    costly = data.count(b'"') - data.count(b'\\"') + data.count(b"[") + data.count(b"{")
    return data.count(b",") + 4 * costly


def decoded(data: bytearray, kind: type[T]) -> T:
    """JSON text as a value of a type.

    Raises:
        RequestError: it is not UTF-8, not JSON (numbers out of range among it), nested too deeply, or of another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        message = "the body is nested too deeply"
    except msgspec.ValidationError as error:
        if kind is not Any:
            raise RequestError(f"the body has a field of another type: {error}", code="invalid_type") from None
        message = f"the body is not valid JSON: {error}"
    except msgspec.DecodeError as error:
        message = f"the body is not valid JSON: {error}"
    raise RequestError(message, code="invalid_json")
