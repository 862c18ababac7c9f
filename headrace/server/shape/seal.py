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


def unsealed(value: str, secret: bytes) -> str:
    """Raises: RequestError: the seal is not of this server."""
    try:
        data = base64.urlsafe_b64decode(value.encode())
    except ValueError:
        data = b""
    seal, text = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, hmac.digest(secret, text, hashlib.sha256)):
        message = "input: encrypted_content was not made by this server since its start: leave the reasoning item out"
        raise RequestError(message, "input", code="invalid_encrypted_content")
    return text.decode("utf-8", "surrogatepass")
