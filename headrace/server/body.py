"""Reads a request's JSON body with strict limits."""

from __future__ import annotations

from email.message import Message
from typing import Any

import msgspec
from fastapi import Request

from headrace.server.errors import ApiError


async def json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a dict. Fields that are null are left out: null means default everywhere in OpenAI's API.

    Raises:
        ApiError: 415 not JSON by its headers; 413 too large; 400 not UTF-8, not JSON (NaN and numbers out of
            range among it), nested too deeply, or not an object.
    """
    _check_content_type(request)
    body = _decode(await _read(request, max_bytes))
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return {name: value for name, value in body.items() if value is not None}


def _check_content_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported: send the body as it is", param="Content-Encoding")
    header = Message()
    header["content-type"] = request.headers.get("content-type", "application/json")
    kind, charset = header.get_content_type(), header.get_content_charset("utf-8")
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"Content-Type must be application/json, not {kind!r}", param="Content-Type")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"JSON is sent as UTF-8, not {charset!r}", param="Content-Type")


async def _read(request: Request, max_bytes: int) -> bytes:
    """Reads at most ``max_bytes``; refuses a larger Content-Length at once."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large", headers={"Connection": "close"})


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        message = "the body is nested too deeply"
    except msgspec.DecodeError as error:
        message = f"the body is not valid JSON: {error}"
    raise ApiError(400, message, code="invalid_json")
