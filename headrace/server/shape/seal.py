"""Reasoning that clients keep and give back: text under a seal that only this server can have made."""

from __future__ import annotations

import base64
import hashlib
import hmac

from headrace.errors import RequestError

_SEAL_BYTES = 32


def sealed(text: str, secret: bytes) -> str:
    """Text that only the server can have made."""
    data = text.encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(hmac.digest(secret, data, hashlib.sha256) + data).decode()


def is_sealed(value: str, secret: bytes) -> bool:
    """Whether the server has made the seal since its start."""
    return _text(value, secret) is not None


def unsealed(value: str, secret: bytes) -> str:
    """Raises: RequestError: the seal is not of this server."""
    text = _text(value, secret)
    if text is None:
        message = "input: encrypted_content was not made by this server since its start: leave the reasoning item out"
        raise RequestError(message, "input", code="invalid_encrypted_content")
    return text.decode("utf-8", "surrogatepass")


def _text(value: str, secret: bytes) -> bytes | None:
    try:
        data = base64.urlsafe_b64decode(value.encode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    seal, text = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    return text if hmac.compare_digest(seal, hmac.digest(secret, text, hashlib.sha256)) else None
